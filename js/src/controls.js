// Controls in a row, HTML, and blocks beside each other

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// What the token under the mouse, or under a finger, says about itself; below the box with the tokens, always in one place
export function tokenLine(box) {
  const node = make("div", { class: "sft-token" });
  const tell = (event) => {
    const token = event.target.closest("bdi[title]");
    if (token) node.textContent = `“${token.textContent}”  ${token.title}`;
  };
  for (const kind of ["mouseover", "click"]) box.addEventListener(kind, tell);
  node.reset = () => { node.textContent = "Point at a token to read about it here."; };
  node.reset();
  return node;
}

const stop = (event) => event.stopPropagation();   // a notebook has shortcuts of its own

function labelled(c, input) {
  return make("label", { class: "sft-field", title: c.title }, make("span", {}, c.label), input);
}

function button(session, c) {
  const node = make("button", { type: "button", class: "sft-button", onclick: () => session.send(c.id, null, "click") });
  const update = (c) => {
    node.textContent = c.label;
    node.title = c.title ?? "";
    node.disabled = c.disabled;
    node.classList.toggle("sft-primary", c.primary ?? false);
  };
  return { node, update };
}

function select(session, c) {
  const input = make("select", { onchange: () => session.send(c.id, input.selectedIndex), onkeydown: stop });
  const node = labelled(c, input);
  let options = "";
  const update = (c) => {
    const json = JSON.stringify(c.options);
    if (json !== options) input.replaceChildren(...c.options.map((says) => make("option", {}, says)));
    options = json;
    input.selectedIndex = c.value;
    input.disabled = c.disabled;
    node.hidden = c.hidden ?? false;
  };
  return { node, update };
}

// One of several, or with `c.several` any of them, as buttons that stay pressed
function chips(session, c) {
  const group = make("span", { class: "sft-chips", role: "group", "aria-label": c.label || c.title });
  const node = make("span", { class: "sft-field", title: c.title });
  if (c.label) node.append(make("span", {}, c.label));
  node.append(group);
  const update = (c) => {
    const chosen = c.several ? c.value : [c.value];
    const focused = [...group.children].indexOf(group.getRootNode().activeElement);
    group.replaceChildren(...c.options.map((says, k) => {
      const pressed = chosen.includes(k);
      const others = c.several ? (pressed ? chosen.filter((n) => n !== k) : [...chosen, k].sort((a, b) => a - b)) : k;
      const chip = make("button", { type: "button", "aria-pressed": String(pressed),
        onclick: () => session.send(c.id, others) }, says);
      chip.disabled = c.disabled;
      return chip;
    }));
    if (focused >= 0) group.children[focused]?.focus();
    node.hidden = c.hidden ?? false;
  };
  return { node, update };
}

function number(session, c) {
  const input = make("input", { type: "number", min: c.min, max: c.max, step: c.step ?? 1, placeholder: c.placeholder, onkeydown: stop });
  input.style.width = `${Math.max(4, String(c.value ?? "").length, (c.placeholder ?? "").length + 1) + 4}ch`;
  const blank = c.blank ?? null;   // the value that an empty field stands for
  const change = () => {
    const value = input.value === "" ? blank : Number(input.value);
    if (value === null || value === input.known) return;
    input.known = value;
    session.send(c.id, value);
  };
  input.addEventListener("change", change);
  const node = labelled(c, input);
  const update = (c) => {
    if (input.known !== c.value || input.value === "") input.value = c.value === blank ? "" : c.value ?? "";
    input.known = c.value;
    input.disabled = c.disabled;
  };
  return { node, update };
}

function range(session, c) {
  const ends = [0, 1].map(() => make("input", { type: "number", min: c.min, onkeydown: stop }));
  const change = () => session.send(c.id, ends.map((e) => Number(e.value)).sort((a, b) => a - b));
  ends.forEach((e, k) => {
    e.setAttribute("aria-label", `${c.label}, ${k ? "at most" : "at least"}`);
    e.addEventListener("change", change);
  });
  const node = make("span", { class: "sft-field", title: c.title }, make("span", {}, c.label), ends[0], "to", ends[1]);
  const update = (c) => {
    ends.forEach((e, k) => { e.value = c.value[k]; e.max = c.max; e.style.width = `${String(c.max).length + 4}ch`; });
  };
  return { node, update };
}

// What is typed is sent, and comes back with the next view: an echo, or a view from before, must not undo what was typed since
function typing(session, id, input) {
  let sent = [], known;
  const send = () => {
    if (input.value === (sent.at(-1) ?? known)) return;
    sent.push(input.value);
    session.send(id, input.value);
  };
  const take = (value) => {
    const echo = sent.indexOf(value);
    if (value !== known && echo < 0) input.value = value;
    if (echo >= 0) sent = sent.slice(echo + 1);
    known = value;
  };
  return { send, take };
}

function text(session, c) {
  const input = make("input", { type: "search", placeholder: c.placeholder, "aria-label": c.label || c.placeholder });
  const { send, take } = typing(session, c.id, input);
  input.addEventListener("keydown", (event) => { stop(event); if (event.key === "Enter") send(); });
  input.addEventListener("change", send);
  input.addEventListener("search", send);
  const node = c.label ? labelled(c, input) : input;
  const update = (c) => {
    take(c.value);
    input.disabled = c.disabled;
  };
  return { node, update };
}

// Several lines; with `c.sends`, Ctrl+Enter or Cmd+Enter presses that button
function lines(session, c) {
  const box = make("textarea", { placeholder: c.placeholder, rows: c.rows, "aria-label": c.label });
  const { send, take } = typing(session, c.id, box);
  let timer;
  const write = () => { clearTimeout(timer); send(); };
  box.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(write, 300); });
  box.addEventListener("change", write);
  box.addEventListener("keydown", (event) => {
    stop(event);
    if (!c.sends || event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    write();
    session.send(c.sends, null, "click");
  });
  const node = make("label", { class: "sft-lines" }, make("span", {}, c.label), box);
  return { node, update: (c) => take(c.value) };
}

const CONTROLS = { button, select, chips, number, range, text, lines };

export function row(session) {
  const node = make("div", { class: "sft-row" });
  let made = new Map();
  const update = (block) => {
    const kept = new Map();
    for (const c of block.items) {
      const key = `${c.kind} ${c.id}`;
      const part = made.get(key) ?? CONTROLS[c.kind](session, c);
      part.update(c);
      kept.set(key, part);
    }
    for (const [key, part] of made) if (!kept.has(key)) part.node.remove();
    made = kept;
    [...kept.values()].forEach((part, k) => {
      if (node.children[k] !== part.node) node.insertBefore(part.node, node.children[k] ?? null);
    });
  };
  return { node, update };
}

export function html(session) {
  const box = make("div", { class: "sft-html" }), line = tokenLine(box), node = make("div", {}, box, line);
  const update = (block) => {
    const opened = new Map([...box.querySelectorAll("details")].map((d) => [d.firstElementChild?.textContent, d.open]));
    box.innerHTML = block.html;
    for (const d of box.querySelectorAll("details")) {
      const before = opened.get(d.firstElementChild?.textContent);
      if (before !== undefined) d.open = before;
    }
    node.hidden = !block.html;
    line.hidden = !block.html.includes("<bdi title");
    line.reset();
    box.classList.toggle("sft-boxed", block.boxed === true);
    if (!block.boxed) return;
    box.tabIndex = 0;   // so that the keyboard scrolls it
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", block.title ?? "details");
  };
  return { node, update };
}

// Groups of blocks beside each other, or below each other where there is no room
export function columns(session) {
  const node = make("div", { class: "sft-columns" });
  const groups = [];
  const update = (block) => {
    block.groups.forEach((blocks, k) => {
      if (!groups[k]) node.append(groups[k] = make("div", { class: "sft-blocks" }));
      session.draw(groups[k], blocks);
    });
    groups.splice(block.groups.length).forEach((group) => {
      group.parts.forEach((part) => session.remove(part));
      group.remove();
    });
  };
  return { node, update, destroy: () => groups.forEach((g) => g.parts.forEach((part) => session.remove(part))) };
}
