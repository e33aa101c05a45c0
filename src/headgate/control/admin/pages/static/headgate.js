// Makes the pages quicker to use. Everything works without it, but for what moves by itself.
"use strict";
(() => {
  document.documentElement.classList.add("scripted");
  rememberZone();
  document.addEventListener("click", copyOnClick);
  document.addEventListener("click", goToLine);
  document.addEventListener("change", fillFromChoice);
  const live = document.querySelector("[data-live]");
  if (live) keepLive(live);

  // Times are read and written in the zone of who sits here: the next page is in it.
  function rememberZone() {
    const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
    if (zone) document.cookie = `zone=${zone}; path=/; max-age=31536000; samesite=strict`;
  }

  async function copyOnClick(event) {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const text = [...document.getElementById(button.dataset.copy).children].map((p) => p.textContent.trim()).join("\n\n")
      || document.getElementById(button.dataset.copy).textContent.trim();
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(document.getElementById(button.dataset.copy));
      button.textContent = "Press Ctrl+C";
    }
    setTimeout(() => { button.textContent = before; }, 2000);
  }

  // A choice fills in the value that belongs to it, unless somebody has typed another one.
  function fillFromChoice(event) {
    const select = event.target.closest("select[data-fills]");
    const field = select && document.getElementById(select.dataset.fills);
    if (!field) return;
    const known = [...select.options].map((option) => option.dataset.value);
    if (!field.value || known.includes(field.value)) field.value = select.selectedOptions[0].dataset.value;
  }

  // From a problem to its line in the editor.
  function goToLine(event) {
    const button = event.target.closest("[data-line]"), area = document.getElementById("text");
    if (!button || !area) return;
    const lines = area.value.split("\n"), at = Number(button.dataset.line) - 1;
    const start = lines.slice(0, at).join("\n").length + (at > 0 ? 1 : 0);
    area.focus();
    area.setSelectionRange(start, start + lines[at].length);
    area.scrollTop = Math.max(0, (at - 5) * parseFloat(getComputedStyle(area).lineHeight));
  }

  function keepLive(place) {
    const every = matchMedia("(prefers-reduced-motion: reduce)").matches ? 5000 : 1000;
    const pause = document.getElementById("pause"), away = document.getElementById("away");
    const told = document.getElementById("told"), since = document.getElementById("away-since");
    let isPaused = false, failures = 0, last = new Date(), state = stateOf(place);
    pause.addEventListener("click", () => {
      isPaused = !isPaused;
      pause.setAttribute("aria-pressed", String(isPaused));
      pause.textContent = isPaused ? "Resume" : "Pause";
    });
    const again = () => setTimeout(look, Math.min(every * 2 ** Math.max(0, failures - 2), 30000));
    async function look() {
      if (isPaused || document.hidden) return again();
      try {
        const answer = await fetch(place.dataset.live, { signal: AbortSignal.timeout(5000) });
        if (answer.redirected) return location.reload();  // signed out
        if (!answer.ok) throw new Error(answer.statusText);
        const fresh = document.createElement("div");
        fresh.append(new DOMParser().parseFromString(await answer.text(), "text/html").body);
        if (!isPaused) turnInto(place, fresh.firstElementChild);
        failures = 0; last = new Date(); away.hidden = true;
        const now = stateOf(place);
        if (now !== state) { told.textContent = now; state = now; }  // only changes are read out
      } catch {
        failures += 1;
        if (failures === 3) { since.textContent = last.toLocaleTimeString(); away.hidden = false; told.textContent = "Connection lost."; }
      }
      return again();
    }
    again();
  }

  function stateOf(place) { return place.querySelector("[data-state]")?.dataset.state ?? ""; }

  // Makes one element's content like another's, and keeps the nodes that are there: focus, selection, scroll and opened
  // details stay. Children with a data-key are the same ones wherever they stand.
  function turnInto(now, next) {
    const keyed = new Map([...now.children].filter((child) => child.dataset?.key).map((child) => [child.dataset.key, child]));
    let at = now.firstChild;
    for (const wanted of [...next.childNodes]) {
      const key = wanted.dataset?.key;
      let mine = key ? keyed.get(key) : at;
      if (!key && mine?.dataset?.key) mine = null;
      if (mine && mine.nodeType === wanted.nodeType && mine.nodeName === wanted.nodeName) {
        if (mine !== at) now.insertBefore(mine, at);
        else at = at.nextSibling;
        if (mine.nodeType === Node.ELEMENT_NODE) { likeAttributes(mine, wanted); turnInto(mine, wanted); }
        else if (mine.nodeValue !== wanted.nodeValue) mine.nodeValue = wanted.nodeValue;
      } else {
        now.insertBefore(wanted, at);
      }
    }
    while (at) { const after = at.nextSibling; at.remove(); at = after; }
  }

  function likeAttributes(mine, wanted) {
    for (const { name, value } of wanted.attributes) if (mine.getAttribute(name) !== value) mine.setAttribute(name, value);
    for (const { name } of [...mine.attributes]) if (!wanted.hasAttribute(name) && name !== "open") mine.removeAttribute(name);
  }
})();
