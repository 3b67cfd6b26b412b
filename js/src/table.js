// A list of any length as a table: rows are asked for as they come into view; click, ↑ ↓ and column heads work
import { make } from "./controls.js";

const ROW = 27;   // pixels
const look = (column) => `${column.number ? "sft-number" : ""} ${column.wide ? "sft-wide" : ""}`.trim();   // wide: left out on a phone

export function table(session, first) {
  const head = make("thead"), body = make("tbody");
  const grid = make("table", { role: "grid", tabindex: "0" }, head, body);
  const box = make("div", { class: "sft-table" }, grid);
  const node = make("div", { class: "sft-table-frame" }, box);
  let block = first, rows = new Map(), chosen = null, rev = null, wanted = null, timer = null;

  const select = (k) => {
    if (k < 0 || k >= block.total) return;
    chosen = k;
    const top = k * ROW, seen = box.clientHeight - ROW;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + ROW > box.scrollTop + seen) box.scrollTop = top + ROW - seen;
    draw();
    clearTimeout(timer);
    timer = setTimeout(() => session.send(block.key, k), 60);   // while a key is held down, the last one counts
  };

  const draw = () => {
    const visible = Math.ceil(box.clientHeight / ROW) + 2 || 14;
    const from = Math.max(0, Math.min(Math.floor(box.scrollTop / ROW) - 4, block.total - visible));
    const to = Math.min(block.total, from + visible + 8);
    const lines = [];
    const missing = [];
    for (let k = from; k < to; k++) {
      const cells = rows.get(k);
      if (!cells) missing.push(k);
      const tr = make("tr", { role: "row", "aria-rowindex": k + 2, "aria-selected": String(k === chosen), id: `${node.id}-${k}`,
        onclick: () => select(k) });
      block.head.forEach((column, n) => {
        const cell = cells ? cells[n] : n ? "" : "…";
        const td = make("td", { class: look(column), title: cells ? cell : undefined, dir: "auto" }, cell ?? "");
        tr.append(td);
      });
      lines.push(tr);
    }
    const space = (n) => make("tr", { "aria-hidden": "true", class: "sft-space", style: `height:${n * ROW}px` });
    body.replaceChildren(space(from), ...lines, space(block.total - to));
    if (!block.total) body.replaceChildren(make("tr", { role: "row", class: "sft-none" }, make("td", { colspan: block.head.length }, block.empty ?? "no rows")));
    if (chosen !== null && block.total) grid.setAttribute("aria-activedescendant", `${node.id}-${chosen}`);
    else grid.removeAttribute("aria-activedescendant");
    const key = `${rev} ${missing[0]} ${missing[missing.length - 1]}`;
    if (missing.length && key !== wanted) {
      wanted = key;
      session.ask(block.key, rev, [missing[0], missing[missing.length - 1] + 1]);
    }
  };

  const take = (message) => {
    if (message.rev !== rev) return;
    message.rows.forEach((cells, k) => rows.set(message.from + k, cells));
    draw();
  };

  box.addEventListener("scroll", () => requestAnimationFrame(draw));
  box.addEventListener("keydown", (event) => {
    const page = Math.max(1, Math.floor(box.clientHeight / ROW) - 2);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in moves)) return;
    event.preventDefault();
    event.stopPropagation();
    select(Math.min(block.total - 1, Math.max(0, (chosen ?? -1) + moves[event.key])));
  });

  const heads = () => {
    const focused = [...head.querySelectorAll("button")].indexOf(head.getRootNode().activeElement);
    head.replaceChildren(headRow());
    if (focused >= 0) head.querySelectorAll("button")[focused]?.focus();   // so that Enter sorts the other way next
  };
  const headRow = () => make("tr", { role: "row" }, ...block.head.map((column, n) => {
    const [by, down] = block.order ?? [];
    const sorted = by === n ? (down ? "descending" : "ascending") : undefined;
    const says = column.name + (sorted ? (down ? " ↓" : " ↑") : "");
    const inside = block.sorts ? make("button", { type: "button", title: `sort by ${column.name}`,
      onclick: () => session.send(block.sorts, by !== n ? [n, !!column.number] : down === !!column.number ? [n, !down] : null) }, says) : says;
    return make("th", { scope: "col", "aria-sort": sorted, class: look(column), style: column.width ? `width:${column.width}` : "" }, inside);
  }));

  const update = (next) => {
    block = next;
    node.id ||= `sft-table-${Math.random().toString(36).slice(2)}`;
    if (rev !== block.rev) { rows = new Map(); wanted = null; }
    const picked = block.chosen ?? null;
    const moved = picked !== chosen || rev !== block.rev;
    rev = block.rev;
    block.rows.forEach((cells, k) => rows.set(block.from + k, cells));
    chosen = picked;
    grid.setAttribute("aria-label", block.title ?? "rows");
    grid.setAttribute("aria-rowcount", block.total + 1);
    grid.style.minWidth = block.width ?? "";
    box.style.maxHeight = `${(block.lines ?? 9) * ROW + ROW + 4}px`;
    session.lists.set(block.key, take);
    heads();
    if (moved && chosen !== null && box.clientHeight) {
      const top = chosen * ROW, seen = box.clientHeight - ROW;
      if (top < box.scrollTop || top + ROW > box.scrollTop + seen) box.scrollTop = Math.max(0, top - ROW);
    }
    draw();
  };
  const size = new ResizeObserver(() => draw());
  size.observe(box);
  return { node, update, destroy: () => { size.disconnect(); session.lists.delete(block.key); } };
}
