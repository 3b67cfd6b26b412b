// Documents token by token, in pieces that are asked for as they come into view
import { make, tokenLine } from "./controls.js";

export function tokens(session, first) {
  const box = make("div", { class: "sft-tokens", tabindex: "0", role: "region", "aria-label": "tokens" });
  const line = tokenLine(box), node = make("div", {}, box, line);
  let block = first, rev = null, pieces = [], wanted = new Set(), frame = 0;

  const fill = (piece, html) => {
    piece.innerHTML = html;
    piece.style.minHeight = "";
    delete piece.dataset.empty;
    seen.unobserve(piece);
  };
  const ask = () => {
    frame = 0;
    const want = [...wanted].slice(0, 24);
    wanted = new Set();
    if (want.length) session.ask(block.key, rev, want);
  };
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && "empty" in entry.target.dataset) wanted.add(Number(entry.target.dataset.piece));
    if (wanted.size && !frame) frame = requestAnimationFrame(ask);
  }, { root: box, rootMargin: "300px" });
  const take = (message) => {
    if (message.rev !== rev) return;
    for (const [k, html] of message.rows) if (pieces[k]) fill(pieces[k], html);
  };

  const update = (next) => {
    block = next;
    session.lists.set(block.key, take);
    if (rev === block.rev) return;
    rev = block.rev;
    seen.disconnect();
    const width = Math.max(200, (box.clientWidth || 800) - 40);
    pieces = [];
    box.replaceChildren(...block.documents.map((document) => make("div", { class: `sft-document sft-${block.layout}` },
      make("div", { class: "sft-name" }, document.name),
      ...document.pieces.map(([start, length]) => {
        const high = Math.ceil(length * 4.6 * 7.8 / width) * 23;
        const piece = make("div", { class: "sft-piece", "data-piece": pieces.length, "data-empty": "", "data-start": start.toLocaleString("en"), style: `min-height:${high}px` });
        if (document.pieces.length < 2) piece.classList.add("sft-only");
        pieces.push(piece);
        return piece;
      }))));
    for (const [k, html] of block.first) fill(pieces[k], html);
    for (const piece of pieces) if ("empty" in piece.dataset) seen.observe(piece);
    box.scrollTop = 0;
    line.reset();
  };
  return { node, update, destroy: () => { seen.disconnect(); session.lists.delete(block.key); } };
}
