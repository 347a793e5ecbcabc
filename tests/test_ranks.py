"""Several ranks load one checkpoint together, over gloo: right bytes, each byte read once, nothing left."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorlift
from support import ranks
from support.checkpoints import Written, random_checkpoint, random_row, write_safetensors
from support.leaks import nothing_left
from support.page_cache import ON_DISK, drop, file_system, resident
from tensorlift.tensors import running

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Every dtype, odd shapes, several files."""
    folder = tmp_path_factory.mktemp("ranks") / "checkpoint"
    return random_checkpoint(folder, shards=3, tensors=25, seed=1, elements=60_000)


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> str:
    """32 tensors of 64 KiB: with that capacity, an arena each."""
    return ranks.even(tmp_path_factory.mktemp("even"))


def digest(state: Any) -> dict[str, Any]:
    """What a state holds, to be compared across processes."""
    found = {}
    for name, tensor in dict(state).items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        shape = [str(tensor.dtype), list(tensor.shape), tensor.untyped_storage().nbytes()]
        found[name] = [*shape, hashlib.sha256(raw).hexdigest()]
    return found


def every_way(rank: int, path: str, exchange: str) -> Any:
    options: dict[str, Any] = {"process_group": "world", "exchange": exchange, "arena_size": 256 * KIB}
    plain = tensorlift.load(path)
    want = digest(plain)
    state = tensorlift.load(path, **options)
    assert digest(state) == want
    with tensorlift.open(path, buffer_size=512 * KIB, **options) as weights:
        assert digest(weights) == want
    model = {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
    filled = tensorlift.load_into(model, path, **options)
    assert digest(model) == want
    assert not filled.missing_keys
    assert filled.stats.exchange == exchange
    return state.stats.to_dict()


@pytest.mark.parametrize("exchange", ["gather", "none"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_all_bytes_are_right_on_every_rank(checkpoint: Written, world: int, exchange: str) -> None:
    found = ranks.values(every_way, world, str(checkpoint.path), exchange)
    nbytes = sum(len(row[2]) for row in checkpoint.tensors.values())
    for stats in found:
        assert (stats["ranks"], stats["exchange"]) == (world, exchange)
        assert stats["seconds"]["agree"] > 0
        assert ("make_group" in stats["seconds"]) == (exchange == "gather")
        assert (stats["received_bytes"] > 0) == (exchange == "gather")
    read = [sum(stats["readers"].values()) for stats in found]
    if exchange == "gather":
        assert sum(read) == nbytes
        assert max(read) <= nbytes / world + 256 * KIB
    else:
        assert read == [nbytes] * world


def in_turn(rank: int, path: str) -> None:
    """Target, then draft, twice each; the first load starts what torch starts once."""

    def both() -> None:
        for _ in range(2):
            tensorlift.load(path, process_group="world", exchange="gather", arena_size=MIB)
            dict(tensorlift.open(path, process_group="world", exchange="gather", arena_size=MIB))

    both()
    settle()
    with nothing_left():
        both()
        settle()


def settle() -> None:
    """Threads that look at the store end within a period of theirs."""
    time.sleep(1.5)


def test_nothing_is_left_behind(checkpoint: Written) -> None:
    ranks.values(in_turn, 3, str(checkpoint.path))


def of_a_stage(rank: int, path: str) -> Any:
    stage = dist.new_group([2, 3])
    if rank < 2:
        return None
    state = tensorlift.load(path, process_group=stage, exchange="gather", arena_size=MIB)
    value = torch.ones(1)
    dist.all_reduce(value, group=stage)
    assert int(value) == 2
    assert "make_group" not in state.stats.seconds
    return [digest(state), state.stats.ranks]


def test_a_group_within_the_world(checkpoint: Written) -> None:
    found = ranks.values(of_a_stage, 4, str(checkpoint.path))
    assert found[:2] == [None, None]
    assert found[2] == found[3] == [digest(tensorlift.load(checkpoint.path)), 2]


def not_mine(rank: int, path: str) -> str:
    group = dist.new_group([0])
    if rank == 0:
        # One rank needs nobody.
        assert tensorlift.load(path, process_group=group).stats.ranks == 1
        return ""
    with pytest.raises(tensorlift.errors.RequestError) as raised:
        tensorlift.load(path, process_group=group)
    return str(raised.value)


def test_a_group_that_this_rank_is_not_in(even: str) -> None:
    assert "this rank is not in the group" in ranks.values(not_mine, 2, even)[1]


def alone(rank: int, path: str) -> Any:
    plain = tensorlift.load(path, process_group="world")
    forced = tensorlift.load(path, process_group="world", exchange="gather")
    assert digest(plain) == digest(forced)
    return [plain.stats.exchange, forced.stats.exchange, forced.stats.received_bytes]


def test_a_store_that_is_a_file(checkpoint: Written) -> None:
    found = ranks.values(every_way, 2, str(checkpoint.path), "gather", store="file")
    assert [stats["ranks"] for stats in found] == [2, 2]


def test_one_rank_makes_no_group_unless_forced(even: str) -> None:
    assert ranks.values(alone, 1, even) == [["none", "gather", 0]]


def test_world_without_a_world(even: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert tensorlift.load(even, process_group="world").stats.ranks == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(tensorlift.errors.RequestError, match="init_process_group"):
        tensorlift.load(even, process_group="world")
    for wrong in ("nccl", 3, object()):
        with pytest.raises(tensorlift.errors.RequestError, match="process_group is"):
            tensorlift.load(even, process_group=wrong)


def with_own_collectives(rank: int, path: str) -> float:
    """A consumer that talks to its peers at each tensor, and one that is slow now and then."""
    own = dist.new_group()
    total = 0.0
    options: dict[str, Any] = {"arena_size": 64 * KIB, "buffer_size": 128 * KIB, "exchange": "gather"}
    for count, (_, tensor) in enumerate(tensorlift.open(path, process_group="world", **options)):
        if count % 8 == rank:
            time.sleep(0.1)
        value = tensor[:1].float()
        dist.all_reduce(value, group=own)
        total += float(value)
    return total


def test_consumers_with_collectives_of_their_own(even: str) -> None:
    want = 3 * sum(float(tensor[0]) for tensor in tensorlift.load(even).values())
    assert ranks.values(with_own_collectives, 3, even) == [want] * 3


def out_of_step(rank: int, path: str, peer_timeout: float) -> Any:
    """One rank sleeps for longer than any limit, at its third tensor; the others run as far as they can."""
    options: dict[str, Any] = {"arena_size": 64 * KIB, "buffer_size": 128 * KIB, "exchange": "gather"}
    names = []
    weights = tensorlift.open(path, process_group="world", peer_timeout=peer_timeout, **options)
    for name, _ in weights:
        names.append(name)
        if rank == 1 and len(names) == 3:
            time.sleep(3 * peer_timeout)
    return names


def test_a_slow_consumer_is_waited_for(even: str) -> None:
    found = ranks.values(out_of_step, 3, even, 1.0)
    assert found == [[f"t{k:02}" for k in range(32)]] * 3


def different_wishes(rank: int, path: str) -> Any:
    names = [[f"t{k:02}" for k in range(16)], [f"t{k:02}" for k in range(8, 24)]][rank]
    state = tensorlift.load(path, names=names, process_group="world", exchange="gather", arena_size=64 * KIB)
    apart = tensorlift.load(
        path, names=f"t{rank:02}", process_group="world", exchange="gather", arena_size=64 * KIB
    )
    assert list(apart) == [f"t{rank:02}"]
    assert (apart.stats.exchange, apart.stats.received_bytes) == ("none", 0)
    assert "no tensor is wanted whole by all ranks" in apart.stats.exchange_reason
    return [digest(state), sum(state.stats.readers.values()), state.stats.received_bytes]


def test_what_one_rank_wants_it_reads_itself(even: str) -> None:
    """Eight tensors are wanted by both, eight by one alone."""
    want = digest(tensorlift.load(even))
    found = ranks.values(different_wishes, 2, even)
    for rank, (state, read, received) in enumerate(found):
        assert state == {name: want[name] for name in [f"t{k:02}" for k in range(8 * rank, 8 * rank + 16)]}
        # Half of each arena that both want, in whole pages.
        assert abs(read - (8 + 4) * 64 * KIB) <= 8 * 4 * KIB
        assert 4 * 64 * KIB <= received <= 8 * (32 + 4) * KIB
    assert sum(read for _, read, _ in found) == 24 * 64 * KIB


def other_order(rank: int, files: list[str]) -> Any:
    order = files if rank == 0 else files[::-1]
    state = tensorlift.load(order, process_group="world", exchange="gather", arena_size=MIB)
    return [list(state), digest(state)]


def test_files_in_another_order_are_the_same_list(checkpoint: Written) -> None:
    first, second = ranks.values(other_order, 2, [str(path) for path in checkpoint.files])
    assert first == second


def from_elsewhere(rank: int, paths: list[str]) -> Any:
    readers = ["PREAD", "URING", "BUFFERED"]
    options: dict[str, Any] = {"backend": readers[rank], "threads": rank + 1, "io_depth": 4 * (rank + 1)}
    state = tensorlift.load(paths[rank], process_group="world", exchange="gather", arena_size=MIB, **options)
    return digest(state)


def test_path_age_threads_and_reader_may_differ(checkpoint: Written, tmp_path: Path) -> None:
    paths = [checkpoint.path]
    for copy in ("one", "two"):
        paths.append(tmp_path / copy)
        paths[-1].mkdir()
        for file in checkpoint.path.iterdir():
            (paths[-1] / file.name).write_bytes(file.read_bytes())
    want = digest(tensorlift.load(checkpoint.path))
    assert ranks.values(from_elsewhere, 3, [str(path) for path in paths]) == [want] * 3


def at_random(rank: int, path: str) -> Any:
    with tensorlift.safe_open(path, "pt", process_group="world") as file:
        names = file.keys() if rank else file.keys()[::-1]
        return digest({name: file.get_tensor(name) for name in names[: 5 + rank]})


def test_safe_open_reads_by_itself(even: str) -> None:
    want = digest(tensorlift.load(even))
    for found in ranks.values(at_random, 2, even):
        assert found == {name: want[name] for name in found}


def outlives(rank: int, path: str) -> None:
    file = tensorlift.safe_open(path, "pt", process_group="world")
    file.get_tensor("t00")
    time.sleep(3 * rank)
    file.close()


def test_closing_a_file_when_the_store_is_gone_is_no_error(even: str) -> None:
    for outcome in ranks.run(outlives, 2, even, store="rank 0"):
        assert outcome.error is None, outcome.trace


def with_digests(rank: int, path: str) -> Any:
    state = tensorlift.load(path, process_group="world", verify=True)
    with pytest.raises((tensorlift.errors.OptionError, tensorlift.errors.PeerError)):
        tensorlift.load(path, process_group="world", verify=True, exchange="gather")
    return [state.stats.exchange, state.stats.verified]


def test_digests_are_compared_by_each_rank(even: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tensorlift.cli.main import app

    path = tmp_path / "model.safetensors"
    path.write_bytes(Path(even).read_bytes())
    assert CliRunner().invoke(app, ["digest", str(path)]).exit_code == 0
    assert ranks.values(with_digests, 2, str(path)) == [["none", 32]] * 2


def what_the_kernel_counts(rank: int, path: str) -> Any:
    def read_bytes() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["read_bytes"])

    # What is imported and touched for the first time is read from the disk as well.
    tensorlift.load(path + ".first", process_group="world", exchange="gather")
    dist.barrier()
    before = read_bytes()
    state = tensorlift.load(path, process_group="world", exchange="gather", arena_size=MIB)
    return [read_bytes() - before, state.stats.to_dict()]


def test_a_cold_file_is_read_once_by_all_together(tmp_path: Path) -> None:
    if file_system(tmp_path) not in ON_DISK:
        pytest.skip(f"the kernel's counts mean something on {', '.join(ON_DISK)} alone")
    path = tmp_path / "model.safetensors"
    write_safetensors(path, {f"t{k:02}": random_row("U8", [700_001], k) for k in range(40)})
    write_safetensors(Path(f"{path}.first"), {"t": random_row("U8", [700_001], 1)})
    drop(path)
    if resident(path).mean() > 0.01:
        pytest.skip("the kernel does not let the file's cache be dropped here")
    nbytes, world = 40 * 700_001, 4
    found = ranks.values(what_the_kernel_counts, world, str(path))
    for read, stats in found:
        assert read <= nbytes / world + 4 * MIB
        assert sum(stats["readers"].values()) <= nbytes / world + MIB
    assert sum(sum(stats["readers"].values()) for _, stats in found) == nbytes
    assert sum(read for read, _ in found) >= nbytes


def by_prediction(rank: int, path: str) -> Any:
    stats = tensorlift.load(path, process_group="world").stats
    return [stats.exchange, stats.exchange_reason, dict(stats.prediction)]


def test_auto_says_what_it_rests_on(even: str) -> None:
    """gloo on one host is slower than any page cache."""
    found = ranks.values(by_prediction, 2, even)
    assert found[0] == found[1]
    exchange, why, figures = found[0]
    assert exchange == "none"
    assert why.startswith("predicted: ")
    assert figures["gather_seconds"] > figures["none_seconds"] > 0
    assert (figures["cached"], figures["cached_known"], figures["ranks_per_host"]) == (1, 1, 2)
    assert figures["bytes"] == 32 * 64 * KIB


def divided(rank: int, path: str, exchange: str) -> Any:
    model = {f"t{k:02}": torch.empty(64 * KIB, dtype=torch.uint8) for k in range(32)}
    asked: list[int] = []
    plain = running.size_engine
    running.size_engine = lambda *given, **named: asked.append(named["ranks"]) or plain(*given, **named)
    tensorlift.load_into(model, path, process_group="world", exchange=exchange)
    return asked


@pytest.mark.parametrize("exchange", ["gather", "none"])
def test_ranks_of_a_host_divide_what_it_has(even: str, exchange: str) -> None:
    for asked in ranks.values(divided, 2, even, exchange):
        assert set(asked) == {2}
