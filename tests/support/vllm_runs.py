"""Servers of a real vLLM, which lies in an environment of its own: TENSORLIFT_TEST_VLLM names its Python."""

from __future__ import annotations

from pathlib import Path

from support import engines

PYTHON = engines.interpreter("vllm") or ""


class Server(engines.Server):
    """One that was started, with an engine in a process of its own."""

    def command(self, model: Path) -> list[str]:
        return [
            *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", "tiny", "--dtype", "bfloat16", "--max-model-len", "128"),
            "--enforce-eager",
        ]

    def environ(self) -> dict[str, str]:
        return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def generate(self) -> tuple[list[int], list[float]]:
        body = {
            "model": "tiny",
            "prompt": "hello world the",
            "max_tokens": 8,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        (choice,) = self.ask("/v1/completions", body)["choices"]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]
