// what is below #live is taken from the same page, fetched anew; a run whose state has changed is shown from the start
const live = document.getElementById("live");
const atEnd = () => { const log = live.querySelector("pre.log"); if (log) log.scrollTop = log.scrollHeight; };
async function refresh() {
  if (document.hidden) return;
  const away = document.getElementById("away");
  try {
    const answer = await fetch(location.href);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("live");
    if (!answer.ok || !fresh) throw new Error();
    if (fresh.dataset.state !== live.dataset.state) { location.reload(); return; }
    const log = live.querySelector("pre.log");
    const follows = !log || log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
    const top = log ? log.scrollTop : 0;
    live.innerHTML = fresh.innerHTML;
    if (follows) atEnd(); else { const now = live.querySelector("pre.log"); if (now) now.scrollTop = top; }
    away.hidden = true;
  } catch { away.hidden = false; }
}
if (live) { atEnd(); setInterval(refresh, Number(live.dataset.refresh)); }
