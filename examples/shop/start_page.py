"""The start page of the shop, with requests to try and a link to the admin pages."""

from __future__ import annotations

import os
from html import escape

from examples.shop.tour import STEPS

__all__ = ["welcome"]

ADMIN_VARIABLE = "SHOP_ADMIN"
"""The environment variable with the URL of the admin pages."""

STYLE = """
:root { color-scheme: light dark; --line: #d5dbe1; --soft: #f4f6f8; --dim: #55606b; --accent: #0b6b8a; }
@media (prefers-color-scheme: dark) {
  :root { --line: #39424b; --soft: #20262c; --dim: #a3aeb8; --accent: #6cc5e0; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { margin: 0; font-size: 1.7rem; }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.15rem; }
p { margin: .6rem 0; }
a { color: var(--accent); }
.dim { color: var(--dim); }
ol { padding-left: 1.4rem; }
li { margin: 1.1rem 0; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: .4rem; margin: .4rem 0 0;
  padding: .6rem .8rem; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }
code { font: .9em ui-monospace, monospace; }
.button { display: inline-block; padding: .5rem 1rem; border-radius: .4rem; background: var(--accent);
  color: light-dark(#fff, #10161b); text-decoration: none; font-weight: 600; }
"""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Headgate example shop</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<h1>Headgate example shop</h1>
<p class="dim">A small API behind rate limits, to try out Headgate.</p>
<p>Every request to this API passes the limits of <code>examples/shop/policy.yaml</code>: by address, by API key, by
tier and by cost. Exports are sold by the month, and charged to a ledger. Send some requests, and watch the decisions in
the terminal where the shop runs.</p>
{admin}
<h2>Requests to try</h2>
<ol>
{steps}
</ol>
<p class="dim">This page and <code>/health</code> cost nothing. Without an API key you have 60 requests a minute.</p>
<h2>Change the limits</h2>
<p>Edit <code>examples/shop/policy.yaml</code> and save it: a valid version takes effect within a second, and an invalid
one changes nothing. Ask which limits apply to a request, and why:</p>
<pre>headgate explain examples/shop/policy.yaml GET /search</pre>
</html>
"""

ADMIN = """<h2>Admin pages</h2>
<p><a class="button" href="{url}">Open the admin pages</a></p>
<p class="dim">To sign in, use the link that the terminal prints. It works once; press Enter there for another.</p>"""


def welcome(base: str) -> str:
    """The page as HTML; `base` is the URL at which the shop is reached."""
    steps = []
    for step in STEPS:
        lines = [ask.curl(base) for ask in step.asks]
        if step.times > 1:
            lines = [f"for i in $(seq {step.times}); do {line}; done" for line in lines]
        steps.append(f"<li>{escape(step.title)}<pre>{escape(chr(10).join(lines))}</pre></li>")
    url = os.environ.get(ADMIN_VARIABLE)
    admin = "" if url is None else ADMIN.format(url=escape(url))
    return PAGE.format(style=STYLE, admin=admin, steps="\n".join(steps))
