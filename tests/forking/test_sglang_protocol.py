"""SGLang's protocol, both ways, with Mooncake over TCP and without SGLang (tests/engines has it with)."""

from __future__ import annotations

import contextlib
import json
import threading
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from support import one_sided as support
from tensorlift import fork
from tensorlift.engine.abi_fork import Memory
from tensorlift.errors import ForkError, OptionError, SeedError
from tensorlift.forking import sglang_protocol
from tensorlift.forking.fabrics import Shared
from tensorlift.forking.manifest import ModelKey
from tensorlift.forking.mooncake import Mooncake
from tensorlift.forking.seed import Seed
from tensorlift.forking.sglang_protocol_answer import PATHS, rank_of
from tensorlift.format.bounds import MOST_PARTS

KEY = ModelKey(model="m", tp=(1, 2))


@pytest.fixture(autouse=True)
def _there() -> Iterator[None]:
    support.need("mooncake")
    with support.nothing_left():
        yield


class Model(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.one = torch.nn.Linear(300, 200, dtype=torch.bfloat16)
        self.many = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(3)) for _ in range(1500))
        self.large = torch.nn.Parameter(torch.empty(5_000_000))
        self.turned = torch.nn.Parameter(torch.empty(40, 30).t())
        self.tied = self.large
        self.register_buffer("own", torch.full((4,), value), persistent=False)
        with torch.no_grad():
            for at, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + at + value)


class Server:
    """As an SGLang server answers, of memory that its engine has registered one parameter by one."""

    def __init__(self, model: Model) -> None:
        self.shared = Shared.borrow(Mooncake, support.OVER_TCP, "127.0.0.1")
        self.memories = [Memory(one.data_ptr(), one.nbytes) for one in model.parameters()]
        self.shared.fabric.register(self.memories)
        session = self.shared.fabric.session().partition("/")[0]
        self.said: list[Any] = [session, {
            name: (one.data_ptr(), one.numel(), one.element_size()) for name, one in model.named_parameters()
        }]  # fmt: skip
        self.asked: list[str] = []
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers.asked.append(self.path)
                if self.path == "/v1/state":
                    self.send_error(404)
                    return
                body = json.dumps({"rank": 0, "remote_instance_transfer_engine_info": answers.answer()})
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.http.serve_forever, args=[0.01])
        self.thread.start()
        self.url = f"sglang+http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self) -> list[Any]:
        return self.said

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()
        self.shared.fabric.unregister(self.memories)
        self.shared.give_back()


@contextlib.contextmanager
def serving(model: Model) -> Iterator[Server]:
    with contextlib.closing(Server(model)) as made:
        yield made


def alike(one: Model, other: Model) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_fork_of_a_server_of_sglang() -> None:
    theirs, ours, told = Model(1), Model(2), []
    with serving(theirs) as server:
        came = fork(server.url, into=ours, key=KEY, protocol="tcp", progress=lambda *now: told.append(now))
    assert alike(theirs, ours)
    assert server.asked == ["/v1/state", *[f"{PATHS[0]}?rank=1"] * 2]
    assert came.own == ("own",)
    assert torch.equal(ours.own, torch.full((4,), 2.0))
    nbytes = sum(one.nbytes for one in theirs.parameters())
    assert (came.bytes, told[-1]) == (nbytes, (nbytes, nbytes))
    (how,) = came.transports.values()
    assert how == "mooncake (tcp); SGLang's protocol, which has neither digests nor epochs"
    assert came.registering_seconds > 0


def test_what_the_server_does_not_have_or_has_otherwise() -> None:
    theirs, ours = Model(1), Model(2)
    with serving(theirs) as server:
        places = server.said[1]
        there = places.pop("many.7")
        with pytest.raises(ForkError, match=r"where 1 tensor of the model are: 'many\.7'"):
            fork(server.url, into=ours, protocol="tcp")
        places["many.7"] = (there[0], 4, there[2])
        with pytest.raises(ForkError, match=r"'many\.7' has 3 elements of 4 bytes here, 4 of 4 there"):
            fork(server.url, into=ours, protocol="tcp")
        assert torch.equal(ours.large, Model(2).large)
        places["many.7"] = (16, *there[1:])
        with pytest.raises(ForkError, match=r"Mooncake's read of .* failed.*are not complete"):
            fork(server.url, into=ours, protocol="tcp")


def test_a_server_that_was_restarted_meanwhile() -> None:
    theirs, ours = Model(1), Model(2)
    with serving(theirs) as server:
        answers = iter([server.said, ["127.0.0.1:1", server.said[1]]])
        server.answer = lambda: next(answers)  # type: ignore[method-assign]
        with pytest.raises(ForkError, match="says something else of its memory than before"):
            fork(server.url, into=ours, protocol="tcp")


def test_files_stand_in(tmp_path: Any) -> None:
    from safetensors.torch import save_file

    theirs, ours = {"a": torch.arange(10)}, {"a": torch.zeros(10, dtype=torch.int64)}
    save_file(theirs, tmp_path / "model.safetensors")
    with serving(Model(1)) as server:
        came = fork(server.url, into=ours, protocol="tcp", fallback=tmp_path)
    assert torch.equal(ours["a"], theirs["a"])
    assert came.by_source == {"files": 80}
    assert "does not say where" in came.left[0]


def test_other_transports_are_refused() -> None:
    with pytest.raises(OptionError, match="SGLang's protocol has mooncake alone"):
        fork("sglang+http://127.0.0.1:1", into=Model(1), transports=["tcp"])


def ask(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.loads(answer.read())


def test_a_seed_answers_as_a_server_of_sglang_does() -> None:
    """The front for its own rank, and where another is for that one's; who was told is a reader."""
    theirs, ours = Model(1), Model(3)
    options: dict[str, Any] = {"transports": ["mooncake"], "protocol": "tcp"}
    with (
        Seed(Model(0), ModelKey(model="m", tp=(0, 2)), **options) as front,
        Seed(theirs, KEY, join=front.url, **options) as running,
    ):
        for path in PATHS:
            said = ask(f"{front.url}{path}?rank=1")
            assert said == ask(f"{running.url}{path}?rank=1")
            assert said["rank"] == 1
            session, places = said["remote_instance_transfer_engine_info"]
            assert session.startswith("127.0.0.1:")
            assert places["large"] == [theirs.large.data_ptr(), 5_000_000, 4]
        assert running.stats()["readers"] == 4
        for rank in ("2", "x", "-1", ""):
            with pytest.raises(urllib.error.HTTPError, match="400"):
                ask(f"{running.url}{PATHS[0]}?rank={rank}")
        fork(f"sglang+{running.url}", into=ours, key=KEY, protocol="tcp")
        assert alike(theirs, ours)
        assert torch.equal(ours.own, theirs.own)


OVER_MOONCAKE: dict[str, Any] = {"transports": ["mooncake"], "protocol": "tcp"}


def test_an_update_of_a_seed_between_two_reads_is_an_error() -> None:
    """What the seed says of its memory is the same behind it."""
    theirs = {name: torch.full((8_000_000,), 1.0) for name in "ab"}
    into = {name: torch.zeros(8_000_000) for name in theirs}
    with Seed(theirs, "k", **OVER_MOONCAKE) as running:
        reports = []

        def between(done: int, total: int) -> None:
            reports.append(done)
            if len(reports) == 1:
                with running.updating(timeout=0):
                    for one in theirs.values():
                        one.fill_(2.0)

        with pytest.raises(ForkError, match=r"updated while they were read, .* no one version: fork again"):
            fork(f"sglang+{running.url}", into=into, protocol="tcp", progress=between)
        assert len(reports) > 1
        came = fork(f"sglang+{running.url}", into=into, protocol="tcp")
    assert all(torch.equal(into[name], one) for name, one in theirs.items())
    assert came.transports[running.url] == "mooncake (tcp); SGLang's protocol, which has no digests"


def test_a_fork_of_a_seed_takes_one_lease() -> None:
    theirs, into = {"a": torch.arange(10)}, {"a": torch.zeros(10, dtype=torch.int64)}
    with Seed(theirs, "k", readers=1, **OVER_MOONCAKE) as running:
        fork(f"sglang+{running.url}", into=into, protocol="tcp")
        assert torch.equal(into["a"], theirs["a"])
        # It is held for a minute.
        with pytest.raises(SeedError, match="it has as many readers as it takes; ask again in") as full:
            fork(f"sglang+{running.url}", into=into, protocol="tcp")
        assert "start the server" not in str(full.value)


def test_a_seed_without_mooncake_or_in_an_update_says_so() -> None:
    with (
        Seed({"a": torch.zeros(3)}, "k") as running,
        pytest.raises(SeedError, match="says nothing of rank 0"),
    ):
        fork(f"sglang+{running.url}", into={"a": torch.zeros(3)})
    options: dict[str, Any] = {"transports": ["mooncake"], "protocol": "tcp"}
    with (
        Seed({"a": torch.zeros(3)}, "k", **options) as running,
        running.updating(),
        pytest.raises(urllib.error.HTTPError, match="503"),
    ):
        ask(f"{running.url}{PATHS[0]}?rank=0")


def test_what_is_asked_for() -> None:
    assert rank_of("/v1/state?rank=1") is None
    assert rank_of(f"{PATHS[1]}?rank=12") == 12
    assert (
        rank_of(PATHS[0]) == rank_of(f"{PATHS[0]}?rank=1e3") == rank_of(f"{PATHS[0]}?rank=9999999999") == -1
    )


def test_an_answer_that_would_take_much_memory_is_refused_before_it_does() -> None:
    class Asked:
        url = "http://127.0.0.1:1"

        def ask(self, method: str, path: str, longest: int) -> bytes:
            return b'{"remote_instance_transfer_engine_info":[' + b"[]," * (MOST_PARTS + 1) + b"0]}"

    tracemalloc.start()
    try:
        with pytest.raises(SeedError, match="answers what no SGLang server answers"):
            sglang_protocol._asked(Asked(), 0)  # type: ignore[arg-type]
        assert tracemalloc.get_traced_memory()[1] < 10 * MOST_PARTS
    finally:
        tracemalloc.stop()
