"""Cases that are about surroundings and lifetimes: all on the same good files."""

ACTIONS: list[tuple[str, list[str], str, str]] = [
    # id, public reports, what to do, what is right
    (
        "no_io_uring",
        ["axboe/liburing#1384", "modio/modio-sdk#17", "moby/moby#39415", "axboe/liburing#989"],
        "load where the kernel refuses io_uring",
        "falls back to another backend by itself (one warning), or where io_uring was asked for by name "
        "an error that "
        "says io_uring is refused (EPERM) and what to set",
    ),
    (
        "no_o_direct",
        ["ServerlessLLM/ServerlessLLM#318", "openzfs/zfs#224", "scylladb/seastar#3518"],
        "load where the kernel refuses O_DIRECT",
        "buffered reads are used instead; values by the oracle",
    ),
    (
        "tmpfs",
        ["ServerlessLLM/ServerlessLLM#318", "Mellanox/UDA#11"],
        "copy the folder to /dev/shm and load there",
        "loads by the oracle",
    ),
    (
        "one_cpu",
        ["python/cpython#80235", "tobocop2/lilbee#660", "NVIDIA/TensorRT-LLM#15296"],
        "load on one CPU; count threads in /proc/self/task",
        "thread count follows affinity and cgroup quota; the load finishes",
    ),
    (
        "keep_all",
        ["vllm-project/vllm#43163", "sgl-project/sglang#22701", "vllm-project/vllm#37309"],
        "tensors = list(iterator); leave the context; then compare, also with order reversed and after a "
        "second load",
        "every tensor owns its memory, or the API says borrowed in its name; values by the oracle",
    ),
    (
        "early_break",
        ["vllm-project/vllm#40564", "pytorch/pytorch#9655"],
        "break after the first tensor; then load again in the same process; 50 times",
        "no hang at exit; descriptors, threads, RSS and device memory back to the start",
    ),
    (
        "consumer_raises",
        ["vllm-project/vllm#40564"],
        "raise ValueError in the loop after 3 tensors, inside and outside a with block",
        "the same ValueError comes out, within 5 s; nothing left behind",
    ),
    (
        "rewritten_after",
        ["safetensors/safetensors#762", "safetensors/safetensors#395", "bghira/SimpleTuner#2714"],
        "load to CPU, then overwrite each file in place with zeros (same size), then compare",
        "tensors unchanged",
    ),
    (
        "truncated_meanwhile",
        ["NVIDIA/TensorRT-LLM#17368", "sgl-project/sglang#6083"],
        "truncate the last file to half after the first tensor has come",
        "an exception naming the file; no SIGBUS, no zeros handed out as weights",
    ),
    (
        "leak_200",
        ["foundation-model-stack/fastsafetensors#94", "safetensors/safetensors#369"],
        "load 200 times in one process; watch RSS, /proc/self/fd, /proc/self/task, device memory",
        "flat after the first 3",
    ),
    (
        "device_forms",
        ["huggingface/lerobot#4042", "unslothai/unsloth#5988", "sgl-project/sglang#29272"],
        "device given as 'cpu', torch.device('cpu'), 'cuda', 'cuda:0', 0, torch.device('cuda'), with and "
        "without a "
        "GPU; on a machine without GPU ask for 'cuda:7'",
        "'cuda' means the current device; a missing device is an error naming it before any file is read",
    ),
    (
        "small_after_big",
        ["scitix/InstantTensor#13", "scitix/InstantTensor#12", "run-ai/runai-model-streamer#61"],
        "load many_shards' first file (4 KiB) with the default settings; note memory taken",
        "buffers are no larger than the work; loads in little memory",
    ),
]
