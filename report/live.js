// Brings the page up to date every 10 seconds. Elements stay and only what changed in them is
// replaced, so scroll, focus, selection and folds stay too. Idiomorph does the same in 900 lines.
"use strict";

const SECONDS = 10;
const notice = document.getElementById("live");
let updated = new Date();

function update(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  if (old.nodeName !== fresh.nodeName || old.id !== fresh.id || !fresh.hasChildNodes()) {
    old.replaceWith(fresh);
    return;
  }
  if (old.className !== fresh.className) old.className = fresh.className;
  const after = [...fresh.childNodes];
  const ids = new Set(after.map((child) => child.id));
  for (const child of [...old.childNodes]) {
    if (child.id && !ids.has(child.id)) child.remove();
  }
  after.forEach((child, i) => {
    const place = old.childNodes[i];
    const isNew = child.id && !document.getElementById(child.id);
    if (!place) old.append(child);
    else if (isNew) place.before(child);
    else update(place, child);
  });
  [...old.childNodes].slice(after.length).forEach((child) => child.remove());
}

async function reload() {
  try {
    const reply = await fetch("./", { cache: "no-cache", signal: AbortSignal.timeout(120_000) });
    if (!reply.ok) throw new Error(reply.status);
    const fresh = new DOMParser().parseFromString(await reply.text(), "text/html");
    document.title = fresh.title;
    update(document.querySelector("main"), fresh.querySelector("main"));
    updated = new Date();
    notice.textContent = `Updated at ${updated.toLocaleTimeString()}`;
    notice.className = "";
  } catch {
    const since = updated.toLocaleTimeString();
    notice.textContent = `The server is gone; this is the page of ${since}. It comes back by itself.`;
    notice.className = "failed";
  }
  setTimeout(reload, SECONDS * 1000);
}

notice.textContent = `Updated at ${updated.toLocaleTimeString()}`;
setTimeout(reload, SECONDS * 1000);
