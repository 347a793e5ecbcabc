"""What a person sees of a registry: in the text, and in a browser."""

from __future__ import annotations

import html
import re
from pathlib import Path

import msgspec

from support import browser
from support.registries import KEY, announced, serving
from support.waiting import until
from tensorlift.fleet import page as pages
from tensorlift.fleet.contract import ForkReport, View
from tensorlift.fleet.registry_client import RegistryClient
from tensorlift.forking.manifest import ModelKey

EVIL = "<script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">&amp;'\n\x1b[1m"


def fork(number: int, state: str = "reading", **more: object) -> ForkReport:
    return msgspec.convert(
        {"fork": f"{number:032x}", "key": msgspec.to_builtins(KEY), "state": state} | more, ForkReport
    )


def text(view: View) -> str:
    """As it is read: without tags."""
    return html.unescape(re.sub(r"<[^>]*>", " ", pages.content(view)))


def words(view: View) -> str:
    return " ".join(text(view).split())


def test_nothing_yet() -> None:
    assert words(View([], [], {}, [])) == (
        "0 seeds of 0 keys, 0 forks under way, 0 B/s No seed has announced itself yet."
    )


def test_seeds_and_forks_by_key() -> None:
    other = ModelKey(model="a/first", tp=(1, 2))
    seeds = [
        announced(1, readers=3, rate=2e9, sent_bytes=7 * 10**9, place="z/r", weights="1"),
        announced(2, weights="2"),
        announced(3, other, rate=1e9),
    ]
    forks = [
        fork(1, done_bytes=10**9, total_bytes=4 * 10**9, seconds=3, seeds=["http://s:1"]),
        fork(2, "waiting"),
    ]
    ended = {(KEY, "done"): 1234, (KEY, "lost"): 2}
    recent = [(fork(3, "failed", reason="it was not to be", seconds=1.5), "failed"), (fork(4), "lost")]
    shown = words(View(seeds, forks, ended, recent))
    assert shown.startswith(
        "3 seeds of 2 keys, 2 forks under way, 3.00 GB/s 'a/first' (target, tp 1 of 2) 1 seed,"
    )
    for line in (
        "'org/model' (target) 2 seeds, 3 readers, 2.00 GB/s; forks: 2 under way, 1,234 done , 2 lost",
        "Versions: 1: 1, 2: 1",
        "http://127.0.0.1:2 z/r 1 3 of 8 2.00 GB/s 7.00 GB http://127.0.0.1:3 2 0 of 8 0 B/s 0 B",
        "reading 1.00 GB of 4.00 GB 3 s http://s:1",
        "waiting 0 B of 0 B 0 s",
        "failed 0 B 1.5 s it was not to be",
        "lost 0 B 0.0 s",
    ):
        assert line in shown, (line, shown)
    assert '<progress max="4000000000" value="1000000000">' in pages.content(
        View(seeds, forks, ended, recent)
    )


def test_what_seeds_say_is_text() -> None:
    seed = announced(1, ModelKey(model=EVIL, role=EVIL, revision=EVIL), weights=EVIL, place=EVIL)
    evil = fork(1, "failed", reason=EVIL, seeds=[EVIL], near={"place": EVIL})
    view = View([seed, announced(2, seed.key, weights="2")], [evil], {(KEY, EVIL): 1}, [(evil, EVIL)])
    shown = pages.content(view)
    assert not re.search(r"<(?!/?(section|h2|p|span|table|caption|thead|tbody|tr|th|td|progress)\b)", shown)
    assert 'onerror="' not in shown
    assert "\x1b" not in shown
    # One event, whatever lines are in it.
    assert all(line.startswith("data: ") for line in pages.event(shown).strip().split("\n"))
    assert pages.event("a\nb") == "data: a\ndata: b\n\n"


def test_a_fleet_is_shown_in_part() -> None:
    seeds = [announced(number) for number in range(1000)]
    shown = pages.content(View(seeds, [], {}, []))
    assert "and 900 more" in shown
    assert "1,000 seeds" in shown
    assert len(shown) < 100_000
    long = announced(1, ModelKey(model="m" * 4000), weights="w" * 4000)
    assert len(pages.content(View([long], [], {}, []))) < 5000


def test_what_was_long_ago_is_not_shown() -> None:
    """Each key that was ever forked would be a section for ever."""
    keys = [ModelKey(model="m", revision=f"r{number}.") for number in range(5)]
    view = View(
        [announced(1, keys[1])],
        [fork(2, key=msgspec.to_builtins(keys[2]))],
        {(key, "done"): 7 for key in keys},
        [(fork(3, "done", key=msgspec.to_builtins(keys[3])), "done")],
    )
    shown = words(view)
    assert shown.startswith("1 seed of 3 keys")
    assert [key.revision in shown for key in keys] == [False, True, True, True, False]
    assert shown.count("7 done") == 3


def test_the_same_figures_are_the_same_text() -> None:
    seeds = [announced(number) for number in range(3)]
    assert pages.content(View(seeds, [], {}, [])) == pages.content(View(seeds[::-1], [], {}, []))


def test_nothing_from_elsewhere() -> None:
    shown = pages.whole(pages.content(View([announced(1)], [], {}, [])))
    assert not re.search(r"(src|href|url|@import)\s*[=(]", shown)
    policy = pages.HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def contrast(colours: str) -> float:
    """Of "rgb(...)rgb(...)", as WCAG counts it."""
    numbers = [int(one) / 255 for one in re.findall(r"\d+", colours)]
    assert len(numbers) == 6, colours
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in numbers]
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05 for r, g, b in (linear[:3], linear[3:])]
    return max(light) / min(light)


def test_a_person_watches_a_roll_out(tmp_path: Path) -> None:
    """In a browser that knows the token: what changes comes by itself, also that a registry is away."""
    evil = announced(1, ModelKey(model=EVIL), weights=EVIL, place=EVIL)
    with browser.page(tmp_path) as page, serving(token="t0ken") as server:
        port, client = int(server.url.rpartition(":")[2]), RegistryClient(server.url, "t0ken")
        client.announce(evil)
        page.open(server.url.replace("//", "//me:t0ken@"))
        until(lambda: "live" in page.text)
        assert "<script>document.title='evil'</script>" in page.text
        client.report(fork(1, done_bytes=5, total_bytes=10))
        until(lambda: "1 fork under way" in page.text)
        assert (
            page.js("document.querySelector('progress').value / document.querySelector('progress').max")
            == 0.5
        )
        client.report(fork(1, "failed", reason=EVIL))
        until(lambda: "1 failed" in page.text)
        assert page.js("document.title") == "tensorlift registry"
        assert page.js("document.scripts.length + document.images.length") == 1
        assert page.errors == []
        for mode, brightest in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(18, 18, 18)")):
            page.tell(
                "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": mode}]
            )
            back = page.js("getComputedStyle(document.body).backgroundColor")
            assert back == brightest
            for what in ("body", "td", ".bad"):
                colour = page.js(f"getComputedStyle(document.querySelector('main {what}, {what}')).color")
                assert contrast(back + colour) > 4.5, (mode, what, colour)
        server.close()
        until(lambda: "no connection since" in page.text)
        assert "1 failed" in page.text
        with serving(token="t0ken", port=port) as again:
            RegistryClient(again.url, "t0ken").announce(announced(5))
            until(lambda: "http://127.0.0.1:6" in page.text and "no connection" not in page.text)
