// Progressive enhancement: everything but the live overview works without it.
"use strict";
(() => {
  document.documentElement.classList.add("scripted");
  storeTimeZone();
  document.addEventListener("click", copyOnClick);
  document.addEventListener("click", goToLine);
  document.addEventListener("change", fillFromSelect);
  const live = document.querySelector("[data-live]");
  if (live) refreshPeriodically(live);

  // Pages show and parse times in the time zone of this cookie.
  function storeTimeZone() {
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

  // Copies the value of the selected option into its field, unless the field was edited.
  function fillFromSelect(event) {
    const select = event.target.closest("select[data-fills]");
    const field = select && document.getElementById(select.dataset.fills);
    if (!field) return;
    const known = [...select.options].map((option) => option.dataset.value);
    if (!field.value || known.includes(field.value)) field.value = select.selectedOptions[0].dataset.value;
  }

  // Selects the line of a problem in the editor.
  function goToLine(event) {
    const button = event.target.closest("[data-line]"), area = document.getElementById("text");
    if (!button || !area) return;
    const lines = area.value.split("\n"), index = Number(button.dataset.line) - 1;
    const start = lines.slice(0, index).join("\n").length + (index > 0 ? 1 : 0);
    area.focus();
    area.setSelectionRange(start, start + lines[index].length);
    area.scrollTop = Math.max(0, (index - 5) * parseFloat(getComputedStyle(area).lineHeight));
  }

  function refreshPeriodically(container) {
    const interval = matchMedia("(prefers-reduced-motion: reduce)").matches ? 5000 : 1000;
    const pause = document.getElementById("pause"), notice = document.getElementById("connection-lost");
    const announcer = document.getElementById("announcer"), since = document.getElementById("connection-lost-since");
    let isPaused = false, failures = 0, last = new Date(), state = stateOf(container);
    pause.addEventListener("click", () => {
      isPaused = !isPaused;
      pause.setAttribute("aria-pressed", String(isPaused));
      pause.textContent = isPaused ? "Resume" : "Pause";
    });
    const schedule = () => setTimeout(refresh, Math.min(interval * 2 ** Math.max(0, failures - 2), 30000));
    async function refresh() {
      if (isPaused || document.hidden) return schedule();
      try {
        const response = await fetch(container.dataset.live, { signal: AbortSignal.timeout(5000) });
        if (response.redirected) return location.reload();  // signed out
        if (!response.ok) throw new Error(response.statusText);
        const fresh = document.createElement("div");
        fresh.append(new DOMParser().parseFromString(await response.text(), "text/html").body);
        if (!isPaused) morph(container, fresh.firstElementChild);
        failures = 0; last = new Date(); notice.hidden = true;
        const newState = stateOf(container);
        if (newState !== state) { announcer.textContent = newState; state = newState; }  // announce changes only
      } catch {
        failures += 1;
        if (failures === 3) { since.textContent = last.toLocaleTimeString(); notice.hidden = false; announcer.textContent = "Connection lost."; }
      }
      return schedule();
    }
    schedule();
  }

  function stateOf(container) { return container.querySelector("[data-state]")?.dataset.state ?? ""; }

  // Morphs the content of an element into another's and reuses its nodes, which preserves focus, selection, scroll
  // position and opened details. Children with the same data-key are matched.
  function morph(current, next) {
    const keyed = new Map([...current.children].filter((child) => child.dataset?.key).map((child) => [child.dataset.key, child]));
    let cursor = current.firstChild;
    for (const wanted of [...next.childNodes]) {
      const key = wanted.dataset?.key;
      let mine = key ? keyed.get(key) : cursor;
      if (!key && mine?.dataset?.key) mine = null;
      if (mine && mine.nodeType === wanted.nodeType && mine.nodeName === wanted.nodeName) {
        if (mine !== cursor) current.insertBefore(mine, cursor);
        else cursor = cursor.nextSibling;
        if (mine.nodeType === Node.ELEMENT_NODE) { copyAttributes(mine, wanted); morph(mine, wanted); }
        else if (mine.nodeValue !== wanted.nodeValue) mine.nodeValue = wanted.nodeValue;
      } else {
        current.insertBefore(wanted, cursor);
      }
    }
    while (cursor) { const after = cursor.nextSibling; cursor.remove(); cursor = after; }
  }

  function copyAttributes(mine, wanted) {
    for (const { name, value } of wanted.attributes) if (mine.getAttribute(name) !== value) mine.setAttribute(name, value);
    for (const { name } of [...mine.attributes]) if (!wanted.hasAttribute(name) && name !== "open") mine.removeAttribute(name);
  }
})();
