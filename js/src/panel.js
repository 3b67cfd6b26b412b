// One anywidget module for all panels: draws the blocks of the trait `view`, and sends back what a person does.
import { row, html, columns } from "./controls.js";
import { chart } from "./chart.js";
import { table } from "./table.js";
import { tokens } from "./tokens.js";

const KINDS = { row, html, columns, chart, table, tokens };

// The view of one panel in one window
class Session {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.count = 0;
    this.waiting = new Map();   // number of an event -> timer until the kernel is said not to answer
    this.lists = new Map();     // key of a list that is loaded on demand -> what takes its rows
  }

  send(id, value, event = "set") {
    const n = ++this.count;
    this.waiting.set(n, setTimeout(() => this.report("late"), 6000));
    this.model.send({ id, event, value, n });
  }

  ask(id, rev, want) {
    this.model.send({ id, event: "ask", value: want, rev });
  }

  receive(message) {
    if (message.ack) {
      for (const [n, timer] of this.waiting) {
        if (n > message.ack) continue;
        clearTimeout(timer);
        this.waiting.delete(n);
      }
      if (!this.waiting.size) this.report("");
    }
    if (message.rows && this.lists.has(message.id)) this.lists.get(message.id)(message);
  }

  report(state) {
    this.root.dataset.kernel = state;
    this.root.dispatchEvent(new CustomEvent("sft-kernel", { detail: state }));
  }

  // Draw blocks into a node: what has not changed stays as it is, with its focus and its place
  draw(parent, blocks) {
    const before = parent.parts ?? [];
    const unused = new Map(before.map((part) => [part.key, part]));
    parent.parts = blocks.map((block, index) => {
      const key = `${block.kind} ${block.key ?? index}`;
      const json = JSON.stringify(block);
      let part = unused.get(key);
      unused.delete(key);
      if (!part) part = { key, json: "", ...KINDS[block.kind](this, block) };
      if (part.json !== json) part.update(block);
      part.json = json;
      return part;
    });
    for (const part of unused.values()) this.remove(part);
    parent.parts.forEach((part, index) => {
      if (parent.children[index] !== part.node) parent.insertBefore(part.node, parent.children[index] ?? null);
    });
  }

  remove(part) {
    part.destroy?.();
    part.node.parts?.forEach((inner) => this.remove(inner));
    part.node.remove();
  }
}

// A picture that is saved in the notebook is for pages without a kernel: not beside its living panel
function hideSavedPicture(id) {
  const name = `sft-hide-${id}`;
  if (!id || document.getElementById(name)) return;
  const style = document.createElement("style");
  style.id = name;
  style.textContent = `[data-sft-saved="${id}"], .jp-OutputArea-child:has([data-sft-saved="${id}"]) { display: none; }`;
  document.head.append(style);
}

// Any colour that CSS knows, oklch() and color() too, as red, green, blue and alpha from 0 to 255
const pixel = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
function rgba(colour) {
  pixel.clearRect(0, 0, 1, 1);
  pixel.fillStyle = colour;
  pixel.fillRect(0, 0, 1, 1);
  return pixel.getImageData(0, 0, 1, 1).data;
}

function isDark(node) {
  for (let e = node; e; e = e.parentElement ?? e.getRootNode()?.host) {
    const [r, g, b, a] = rgba(getComputedStyle(e).backgroundColor);
    if (a > 0) return 0.3 * r + 0.59 * g + 0.11 * b < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

const clock = () => new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

function render({ model, el }) {
  const root = document.createElement("section");
  root.className = "sft-panel";
  root.setAttribute("data-lm-suppress-shortcuts", "true");
  root.setAttribute("aria-label", model.get("title"));
  const notice = document.createElement("div");
  notice.className = "sft-notice";
  notice.setAttribute("role", "status");
  notice.hidden = true;
  const body = document.createElement("div");
  body.className = "sft-blocks";
  root.append(notice, body);
  el.append(root);

  const session = new Session(model, root);
  let heard = Date.now(), heardAt = clock(), silent = false, ended = false;
  const say = () => {
    const late = root.dataset.kernel === "late";
    notice.hidden = !ended && !silent && !late;
    const why = ended ? "This panel belongs to an earlier kernel" : "The kernel of this notebook is gone or has hung";
    const more = model.get("beat_seconds") > 0
      ? "A run in a process of its own goes on. Run the cell again to follow it." : "Run the cell again.";
    if (ended || silent) notice.textContent = `${why}: this is how it looked at ${heardAt}. ${more}`;
    else if (late) notice.textContent = "The kernel is busy or gone: what you asked for waits until it answers.";
  };
  const hear = () => { heard = Date.now(); heardAt = clock(); silent = false; ended = false; say(); };
  const draw = () => { session.draw(body, model.get("view")); hear(); };
  const receive = (message) => { hear(); session.receive(message); };
  root.addEventListener("sft-kernel", say);
  const pulse = setInterval(() => {
    const every = model.get("beat_seconds");   // 0: it changes only when something is pressed
    silent = every > 0 && Date.now() - heard > 1000 * Math.max(4 * every, 8);
    say();
  }, 1000);

  hideSavedPicture(model.get("saved_id"));
  const theme = () => {
    const now = isDark(el) ? "dark" : "light";
    if (root.dataset.theme === now) return;
    root.dataset.theme = now;
    root.dispatchEvent(new CustomEvent("sft-theme"));
  };
  const watcher = new MutationObserver(() => setTimeout(theme, 50));
  for (const node of [document.documentElement, document.body]) {
    watcher.observe(node, { attributes: true, attributeFilter: ["class", "style", "data-theme", "data-jp-theme-light"] });
  }
  const attached = new ResizeObserver(theme);
  attached.observe(root);
  model.on("change:view", draw);
  model.on("change:beat", hear);
  model.on("msg:custom", receive);
  const end = () => { ended = true; say(); };
  model.on("comm_live_update", end);   // its kernel was restarted, or shut down
  theme();
  draw();
  model.send({ event: "open" });   // not every front end lets a panel draw itself when it is displayed
  return () => {
    clearInterval(pulse);
    watcher.disconnect();
    attached.disconnect();
    model.off("change:view", draw);
    model.off("change:beat", hear);
    model.off("msg:custom", receive);
    model.off("comm_live_update", end);
    body.parts.forEach((part) => session.remove(part));
  };
}

export default { render };
