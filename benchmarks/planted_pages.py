"""Web pages around planted documents, in WARC files: what an extractor must give, and what it must leave out.

`write` makes FOLDER/NNNNN.warc.gz (one gzip member a record, as Common Crawl's), FOLDER/html/ID.html for the first of
them and FOLDER/truth.jsonl, one line for each record: `id`, `url`, `type` (that of the record), `inside` (paragraphs
that must be in the text, in order), `outside` (strings that must not be), `variant` (of VARIANTS), `charset`. Records
with nothing inside must give no document.
"""

from __future__ import annotations

import gzip
import html
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planted_kinds as kinds
from planted_text import Pool, pool

DATE = "2024-05-04T03:02:01Z"
VARIANTS = {  # and their shares
    "article": 50, "div": 12, "table": 6, "windows-1252": 6, "utf-8 by meta": 6, "gzip": 5, "chunked": 4, "broken": 4,
    "not found": 3, "pdf": 2, "request": 1, "robots": 1,
}  # fmt: skip
NAVIGATION = ("Home", "Products", "About us", "Sign in to your account", "Shopping cart", "All categories")
BANNER = "We and our partners store cookies on your device. Accept all or manage your choices."
FOOTER = "Copyright 2024 Example Media Group. All rights reserved. Imprint and contact."
SIDEBAR = ("Most read this week", "Subscribe to our newsletter", "Follow us on social media")
SCRIPT = "window.dataLayer = window.dataLayer || []; function track(name) { dataLayer.push({event: name}); }"
STYLE = ".banner-overlay { position: fixed; bottom: 0; z-index: 9000; }"


def page(paragraphs: list[str], title: str, rng: random.Random, variant: str = "article") -> tuple[str, list[str]]:
    """HTML around paragraphs, and the strings on it that are no part of the text."""
    comments = [f"user{rng.randrange(1000)} liked this {rng.randrange(2, 50)} minutes ago" for _ in range(2)]
    items = "".join(f'<li><a href="/{i}">{x}</a></li>' for i, x in enumerate(NAVIGATION))
    related = "".join(f'<li><a href="/r{i}">{x}</a></li>' for i, x in enumerate(SIDEBAR))
    body = "\n".join(f"<p>{html.escape(x, quote=False)}</p>" for x in paragraphs)
    if variant == "div":
        body = "\n".join(f'<div class="text">{html.escape(x, quote=False)}</div>' for x in paragraphs)
        main = f'<div id="content" class="post-content"><h1>{title}</h1>\n{body}\n</div>'
    elif variant == "table":
        main = f"<table><tr><td><h1>{title}</h1>\n{body}\n</td></tr></table>"
    else:
        main = f"<main><article><h1>{title}</h1>\n{body}\n</article></main>"
    meta = {"windows-1252": '<meta http-equiv="Content-Type" content="text/html; charset=windows-1252">',
            "utf-8 by meta": '<meta charset="utf-8">'}.get(variant, "")  # fmt: skip
    text = f"""<!DOCTYPE html>
<html lang="en"><head>{meta}<title>{title} | Example</title><style>{STYLE}</style><script>{SCRIPT}</script></head>
<body><header><nav class="menu"><ul>{items}</ul></nav></header>
<div id="cookie-banner" class="cookie-consent" role="dialog"><p>{BANNER}</p><button>Accept all</button></div>
{main}
<aside class="sidebar"><ul>{related}</ul></aside>
<div class="comments" id="comments">{"".join(f'<p class="comment">{x}</p>' for x in comments)}</div>
<noscript>Please enable JavaScript to view this site.</noscript>
<footer class="footer"><p>{FOOTER}</p></footer><script>track("end");</script></body></html>
"""
    if variant == "broken":  # tags that are never closed
        text = text.replace("</p>", "").replace("</article></main>", "").replace("</li>", "")
    outside = [
        *NAVIGATION,
        BANNER,
        FOOTER,
        *SIDEBAR,
        SCRIPT,
        STYLE,
        *comments,
        "Please enable JavaScript",
        'track("end")',
    ]
    return text, outside


def _chunked(data: bytes, size: int = 1000) -> bytes:
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(x), x) for x in [*parts, b""])


def record(url: str, name: str, data: bytes, kind: str = "response", content: str = "application/http") -> bytes:
    """One WARC record as a gzip member. data: its block."""
    kind_of = "" if kind == "warcinfo" else f"; msgtype={kind}"
    fields = {"WARC-Type": kind, "WARC-Date": DATE, "WARC-Record-ID": f"<urn:uuid:{name}>", "WARC-Target-URI": url,
              "Content-Type": content + kind_of, "Content-Length": len(data)}  # fmt: skip
    head = "WARC/1.0\r\n" + "".join(f"{x}: {y}\r\n" for x, y in fields.items() if y != "") + "\r\n"
    return gzip.compress(head.encode() + data + b"\r\n\r\n", 6, mtime=0)


def response(body: bytes, content: str, status: str = "200 OK", *headers: str) -> bytes:
    """An HTTP response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def _page(text: str, variant: str) -> tuple[bytes, str]:
    """The HTTP response of a page, and its character set."""
    if variant == "windows-1252":
        return response(text.encode("cp1252"), "text/html"), "windows-1252"
    body, plain = text.encode(), "text/html" if variant == "utf-8 by meta" else "text/html; charset=utf-8"
    if variant == "gzip":
        return response(gzip.compress(body, mtime=0), plain, "200 OK", "Content-Encoding: gzip"), "utf-8"
    if variant == "chunked":
        return response(_chunked(body), plain, "200 OK", "Transfer-Encoding: chunked"), "utf-8"
    return response(body, plain, "404 Not Found" if variant == "not found" else "200 OK"), "utf-8"


def planted(text: Pool, number: int, seed: int = 0) -> tuple[bytes, dict[str, Any], str | None]:
    """A record, the line about it, and its HTML if it has any."""
    rng = random.Random((seed + 1 << 41) | number)
    variant = rng.choices(list(VARIANTS), list(VARIANTS.values()))[0]
    name = str(f"{number:08x}-0000-4000-8000-{seed:012x}")
    url = f"https://www.example.com/{number % 89}/{number}.html"
    line: dict[str, Any] = {"id": name, "url": url, "type": "response", "variant": variant, "charset": None,
                            "inside": [], "outside": []}  # fmt: skip
    others: dict[str, Callable[[], bytes]] = {
        "pdf": lambda: record(url, name, response(b"%PDF-1.4 " + rng.randbytes(2000), "application/pdf")),
        "robots": lambda: record(url, name, response(b"User-agent: *\nDisallow: /private\n", "text/plain")),
        "request": lambda: record(url, name, b"GET / HTTP/1.1\r\nHost: www.example.com\r\n\r\n", "request"),
    }
    if variant in others:
        line["type"] = "request" if variant == "request" else "response"
        return others[variant](), line, None
    accents = variant in ("windows-1252", "utf-8 by meta", "gzip")
    parts = kinds.paragraphs(text, rng, rng.randrange(10, 60))
    parts = [kinds.accented(x) for x in parts] if accents else parts
    title = " ".join(rng.choice(text.words) for _ in range(5)).capitalize()
    source, outside = page(parts, title, rng, variant)
    block, line["charset"] = _page(source, variant)
    present = variant != "not found"
    line |= {"inside": parts if present else [], "outside": outside}
    return record(url, name, block), line, source


def write(folder: str | Path, size: int, seed: int = 0, text: Pool | None = None, shard: int = 64_000_000,
          pages: int = 20) -> dict[str, Any]:  # fmt: skip
    """WARC files with at least `size` bytes of paragraphs. pages: how many HTML files stand beside them."""
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose another folder, or delete it")
    (folder / "html").mkdir(parents=True)
    text = text or pool()
    total = filled = number = files = 0
    info = f"software: planted_pages\r\nseed: {seed}\r\n".encode()
    file = None
    with open(folder / "truth.jsonl", "w") as truths:
        while total < size:
            if file is None:
                file = open(folder / f"{files:05d}.warc.gz", "wb")  # noqa: SIM115
                file.write(
                    record("", f"{files:08x}-0000-4000-8000-ffffffffffff", info, "warcinfo", "application/warc-fields")
                )
                files += 1
            data, line, source = planted(text, number, seed)
            file.write(data)
            truths.write(json.dumps(line) + "\n")
            if source and number < pages:
                (folder / "html" / f"{line['id']}.html").write_text(source, encoding=line["charset"])
            length = sum(map(len, line["inside"]))
            total, filled, number = total + length, filled + length, number + 1
            if filled >= shard or total >= size:
                file.close()
                file, filled = None, 0
    return {"seed": seed, "bytes": total, "records": number, "files": files}


def score(folder: str | Path, extracted: dict[str, str]) -> dict[str, float]:
    """Texts by URL held against the truth: shares of paragraphs that are in, of strings that are out, of documents."""
    inside = [0, 0]
    outside = [0, 0]
    empty = [0, 0]
    with open(Path(folder) / "truth.jsonl") as lines:
        for line in map(json.loads, lines):
            text = " ".join(extracted.get(line["url"], "").split())
            if line["inside"]:
                inside[0] += sum(x in text for x in line["inside"])
                inside[1] += len(line["inside"])
                outside[0] += sum(x not in text for x in line["outside"])
                outside[1] += len(line["outside"])
            else:
                empty[0] += not text
                empty[1] += 1
    shares = {"inside": inside, "outside": outside, "no document": empty}
    return {x: a / b if b else 1.0 for x, (a, b) in shares.items()}
