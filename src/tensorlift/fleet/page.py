"""The page of a registry: what a person watches during a roll-out. Plain HTML; nothing from elsewhere.

Whatever seeds and forks say of themselves is text: escaped here, and the browser is told to run nothing but
the one script that puts new figures in.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from html import escape

from tensorlift.fleet.contract import Announcement, ForkReport, View
from tensorlift.forking.keys import told_key
from tensorlift.forking.manifest import ModelKey
from tensorlift.format.quoting import clean, plural
from tensorlift.stats import human_bytes

__all__ = ["HEADERS", "content", "event", "whole"]

# A browser has to draw it once a second.
_SHOWN = 100
_LONGEST = 200

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 76rem; padding: 0 1rem;
  background: Canvas; color: CanvasText; }
h1 { font-size: 1.3rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .2rem; overflow-wrap: anywhere; }
p { margin: .2rem 0; }
table { border-collapse: collapse; width: 100%; margin: .6rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; }
th, td { text-align: left; padding: .2rem .8rem .2rem 0; vertical-align: top; overflow-wrap: anywhere;
  border-bottom: 1px solid color-mix(in srgb, CanvasText 18%, Canvas); }
th { font-weight: 600; }
.number { text-align: right; white-space: nowrap; }
.bad { color: light-dark(#b00020, #ff8a80); }
progress { width: 8rem; accent-color: light-dark(#0b57d0, #8ab4f8); }
#state { float: right; }
"""
_SCRIPT = """
const state = document.getElementById("state"), main = document.querySelector("main");
const events = new EventSource("events");
const say = (text, bad) => { state.textContent = text; state.className = bad ? "bad" : ""; };
const now = () => new Date().toLocaleTimeString();
events.onopen = () => say("live", false);
events.onmessage = (event) => { main.innerHTML = event.data; say("live, last change " + now(), false); };
events.onerror = () => say(events.readyState === 2
  ? "no connection: reload the page" : "no connection since " + now() + ", trying again", true);
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def whole(text: str) -> str:
    """The page, with content()."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tensorlift registry</title><style>{_STYLE}</style></head><body>"
        '<p id="state" role="status">as of the loading of this page</p><h1>tensorlift registry</h1>'
        f"<main>{text}</main><script>{_SCRIPT}</script></body></html>\n"
    )


def event(text: str) -> str:
    """As a server-sent event."""
    return "".join(f"data: {line}\n" for line in text.split("\n")) + "\n"


def content(view: View) -> str:
    """What changes on it; the same text for the same figures. A key of which nothing is there any more, and
    nothing was of late, is left out: there may be one for each version that ever was.
    """
    forks = [*view.forks, *(fork for fork, _ in view.recent)]
    keys = sorted({*(seed.key for seed in view.seeds), *(fork.key for fork in forks)}, key=told_key)
    rate, reading = sum(seed.load.rate for seed in view.seeds), len(view.forks)
    total = (
        f"<p>{plural(len(view.seeds), 'seed')} of {plural(len(keys), 'key')}, "
        f"{plural(reading, 'fork')} under way, {_rate(rate)}</p>"
    )
    if not keys:
        return total + "<p>No seed has announced itself yet.</p>"
    return total + "".join(_of_key(key, view) for key in keys)


def _of_key(key: ModelKey, view: View) -> str:
    seeds = [seed for seed in view.seeds if seed.key == key]
    forks = [fork for fork in view.forks if fork.key == key]
    recent = [(fork, state) for fork, state in view.recent if fork.key == key]
    readers, rate = sum(seed.load.readers for seed in seeds), sum(seed.load.rate for seed in seeds)
    ended = ", ".join(
        f'<span class="{"" if state == "done" else "bad"}">{number:,} {_text(state)}</span>'
        for state in ("done", "failed", "lost")
        if (number := view.ended.get((key, state), 0)) or state == "done"
    )
    return (
        f"<section><h2>{_text(told_key(key), 1000)}</h2>"
        f"<p>{plural(len(seeds), 'seed')}, {plural(readers, 'reader')}, {_rate(rate)}; "
        f"forks: {len(forks):,} under way, {ended}</p>{_versions(seeds)}{_seeds(seeds)}{_forks(forks)}"
        f"{_ended(recent)}</section>"
    )


def _versions(seeds: Sequence[Announcement]) -> str:
    names = dict.fromkeys(seed.weights for seed in seeds)
    if len(names) < 2:
        return ""
    counted = [
        f"{_text(name) or 'unnamed'}: {sum(s.weights == name for s in seeds):,}" for name in sorted(names)
    ]
    return f"<p>Versions: {', '.join(counted[:_SHOWN])}</p>"


def _seeds(seeds: Sequence[Announcement]) -> str:
    rows = [
        (
            _text(seed.url), _text(seed.near.place), _text(seed.weights),
            f"{seed.load.readers:,} of {seed.most_readers:,}", _rate(seed.load.rate),
            human_bytes(seed.load.sent_bytes),
        )
        for seed in sorted(seeds, key=lambda seed: (-seed.load.readers, seed.near.place, seed.url))
    ]  # fmt: skip
    return _table("Seeds", ("URL", "place", "version", "#readers", "#rate", "#sent"), rows)


def _forks(forks: Sequence[ForkReport]) -> str:
    rows = [
        (
            _text(fork.state), _text(fork.near.place), _progress(fork),
            f"{human_bytes(fork.done_bytes)} of {human_bytes(fork.total_bytes)}", f"{fork.seconds:,.0f} s",
            _text(", ".join(fork.seeds)),
        )
        for fork in sorted(forks, key=lambda fork: (fork.state, fork.fork))
    ]  # fmt: skip
    return _table("Forks under way", ("state", "place", "progress", "#bytes", "#for", "from"), rows)


def _ended(recent: Iterable[tuple[ForkReport, str]]) -> str:
    rows = [
        (
            f'<span class="{"" if state == "done" else "bad"}">{_text(state)}</span>', _text(fork.near.place),
            human_bytes(fork.done_bytes), f"{fork.seconds:,.1f} s", _text(", ".join(fork.seeds)),
            _text(fork.reason, 500),
        )
        for fork, state in recent
    ]  # fmt: skip
    return _table("Forks that ended last", ("how", "place", "#bytes", "#in", "from", "why"), rows)


def _progress(fork: ForkReport) -> str:
    return f'<progress max="{fork.total_bytes or 1}" value="{fork.done_bytes}"></progress>'


def _table(name: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A head that begins with # is of numbers."""
    if not rows:
        return ""
    kinds = [' class="number"' if head.startswith("#") else "" for head in heads]
    head = "".join(
        f'<th scope="col"{kind}>{text.lstrip("#")}</th>' for text, kind in zip(heads, kinds, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows[:_SHOWN]
    )
    more = f"<p>and {len(rows) - _SHOWN:,} more</p>" if len(rows) > _SHOWN else ""
    return (
        f"<table><caption>{name}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"
    )


def _rate(rate: float) -> str:
    return f"{human_bytes(int(rate))}/s"


def _text(text: str, longest: int = _LONGEST) -> str:
    shown = clean(text[:longest]) + ("…" if len(text) > longest else "")
    return escape(shown)
