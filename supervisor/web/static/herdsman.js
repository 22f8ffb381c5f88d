// Keep the page fresh: fetch it again and put the new content in place of the old.
// Without this script the page works the same and reloads itself.
"use strict";

const REFRESH_MS = 2000;
const TIMEOUT_MS = 8000;

async function refresh() {
  const live = document.getElementById("live");
  // Text that is being selected is being read or copied: leave it alone.
  const selecting = !window.getSelection().isCollapsed;
  if (document.hidden || selecting) return;
  try {
    const answer = await fetch(location.pathname, {
      cache: "no-store",
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const fresh = page.getElementById("live");
    if (!fresh) throw new Error("not the dashboard");
    document.title = page.title;
    const held = document.activeElement?.getAttribute?.("href");
    live.replaceWith(document.adoptNode(fresh));
    if (held) fresh.querySelector(`a[href="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
  } catch {
    // Old numbers must not look like fresh ones.
    live.classList.add("stale");
    document.getElementById("stale").hidden = false;
  }
}

async function keepFresh() {
  await refresh();
  setTimeout(keepFresh, REFRESH_MS);
}

setTimeout(keepFresh, REFRESH_MS);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
