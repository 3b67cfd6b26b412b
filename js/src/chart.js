// Curves, intervals and bars on real axes: values under the mouse, zoom, marks, a log scale, smoothing that says so
import uPlot from "uplot";
import { make } from "./controls.js";

// Told apart without red against green, on white and on a dark page; those of saved pictures (nbs/10_runs/03_metrics.ipynb)
const COLOURS = ["#1c7ed6", "#d9580d", "#0b8f6c", "#bf5a96", "#9c7400", "#6a7fd0"];
const NAMED = { supervised: "#2da44e", "all tokens": "#8c959f" };   // as in the text, in both themes

const WHOLE = [...Array(9).keys()].flatMap((n) => [1, 2, 5].map((k) => k * 10 ** n));   // steps, batches, tokens

export function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}
const percent = (value) => value === null || value === undefined ? "–" : `${Number((100 * value).toFixed(1))}%`;

// Exponential moving average without the pull of its beginning
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return v;
    sum = weight * sum + (1 - weight) * v;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Series with steps of their own on one x axis
function align(series) {
  const xs = [...new Set(series.flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, k) => [x, k]));
  return [xs, ...series.map((s) => {
    const values = new Array(xs.length).fill(null);
    for (const p of s.points) values[at.get(p[0])] = p[1];
    return values;
  })];
}

function nearest(values, k) {
  for (let d = 0; d < values.length; d++) {
    if (values[k - d] != null) return k - d;
    if (values[k + d] != null) return k + d;
  }
  return null;
}

export function chart(session, first) {
  const title = make("div", { class: "sft-chart-title" });
  const plot = make("div", { class: "sft-plot" });
  const tells = make("div", { class: "sft-chart-values" });
  const node = make("figure", { class: "sft-chart", tabindex: "0", onfocus: () => tells.setAttribute("aria-live", "polite"),
    onblur: () => { tells.removeAttribute("aria-live"); u?.setCursor({ left: -10, top: -10 }); } }, title, plot, tells);
  let u = null, block = first, columns = null, shape = "";
  const theme = () => session.root.dataset.theme ?? "light";
  const colour = (k) => NAMED[block.series[k]?.name] ?? COLOURS[(block.series[k]?.colour ?? k) % 6];
  const ink = () => getComputedStyle(node).color;
  const show = (v) => block.percent ? percent(v) : format(v);

  const value_text = (s, k) => {
    const at = nearest(s.values, k);
    if (at === null) return null;
    const point = s.points.find((p) => p[0] === columns[0][at]);
    const interval = s.look === "interval" ? ` (95%: ${show(point[2])} to ${show(point[3])})` : "";
    const where = at === k ? "" : ` at ${format(columns[0][at])}`;
    return make("span", {}, make("i", { style: `background:${s.ink}` }), `${s.label} ${show(s.values[at])}${interval}${where}`);
  };

  const tell = () => {
    const under = u?.cursor.idx;
    if (under == null && block.hint) return tells.replaceChildren(block.hint);
    const here = columns[0].indexOf(block.marks?.find((m) => m.status === "here")?.x);
    const k = under ?? (here >= 0 ? here : columns[0].length - 1);
    if (k < 0) return tells.replaceChildren("no values yet");
    const marks = (block.marks ?? []).filter((m) => under != null && m.x === columns[0][k]);
    const [, , from, to] = block.series[0]?.look === "bars" ? block.series[0].points[k] : [];   // a bar of several values
    const where = from === undefined || from === to ? format(from ?? columns[0][k]) : `${format(from)} to ${format(to)}`;
    const place = make("span", {}, `${under == null && here < 0 && !block.lines ? "last: " : ""}${block.x ?? "step"} ${where}`);
    const parts = block.shown.map((s) => value_text(s, k)).filter(Boolean);
    const lines = (block.lines ?? []).map((line, n) => make("span", {},
      make("i", { class: "sft-dashed", style: `border-color:${colour(block.series.length + n)}` }), `${line.name} ${show(line.value)}` +
      (line.low == null ? "" : ` (95%: ${show(line.low)} to ${show(line.high)})`)));
    tells.replaceChildren(place, ...parts, ...lines, ...marks.map((m) => make("b", {}, m.text)));
  };

  // Marks, intervals and level lines, which uPlot has not
  const paint = (u) => {
    const { ctx, bbox } = u, ratio = devicePixelRatio;
    const x = (v) => u.valToPos(v, "x", true), y = (v) => u.valToPos(v, "y", true);
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    (block.lines ?? []).forEach((line, n) => {
      ctx.strokeStyle = ctx.fillStyle = colour(block.series.length + n);
      if (line.low != null) {
        ctx.globalAlpha = .12;
        ctx.fillRect(bbox.left, y(line.high), bbox.width, y(line.low) - y(line.high));
        ctx.globalAlpha = 1;
      }
      ctx.lineWidth = 1.5 * ratio;
      ctx.setLineDash([6 * ratio, 4 * ratio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y(line.value));
      ctx.lineTo(bbox.left + bbox.width, y(line.value));
      ctx.stroke();
      ctx.setLineDash([]);
    });
    block.series.forEach((s, n) => {
      if (s.look !== "interval") return;
      ctx.strokeStyle = colour(n);
      ctx.lineWidth = 1.5 * ratio;
      for (const [px, , low, high] of s.points) {
        const [cx, top, end, cap] = [x(px), y(high), y(low), 4 * ratio];
        ctx.beginPath();
        ctx.moveTo(cx, top); ctx.lineTo(cx, end);
        ctx.moveTo(cx - cap, top); ctx.lineTo(cx + cap, top);
        ctx.moveTo(cx - cap, end); ctx.lineTo(cx + cap, end);
        ctx.stroke();
      }
    });
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    for (const m of block.marks ?? []) {
      const cx = x(m.x);
      ctx.strokeStyle = ctx.fillStyle = m.status === "fail" ? (theme() === "dark" ? "#ff7b72" : "#cf222e")
        : m.status === "warn" ? (theme() === "dark" ? "#e3b341" : "#9a6700") : ink();
      ctx.lineWidth = ratio;
      if (m.status) {
        ctx.setLineDash([2 * ratio, 3 * ratio]);
        ctx.beginPath(); ctx.moveTo(cx, bbox.top); ctx.lineTo(cx, bbox.top + bbox.height); ctx.stroke();
        ctx.setLineDash([]);
        ctx.beginPath(); ctx.moveTo(cx - 5 * ratio, bbox.top); ctx.lineTo(cx + 5 * ratio, bbox.top);
        ctx.lineTo(cx, bbox.top + 8 * ratio); ctx.fill();
      } else if (m.y != null) {
        ctx.textAlign = cx > bbox.left + bbox.width * .8 ? "right" : cx < bbox.left + bbox.width * .2 ? "left" : "center";
        const beside = block.marks.some((other) => other.status && other.x === m.x);   // not through the line of another mark
        if (beside && ctx.textAlign === "center") ctx.textAlign = "left";
        ctx.fillText(m.text, cx + (beside ? (ctx.textAlign === "right" ? -8 : 8) * ratio : 0), Math.max(bbox.top + 12 * ratio, y(m.y) - 7 * ratio));
      }
    }
    ctx.restore();
  };

  // All that is drawn must have room: ends of intervals and level lines, too
  const range = () => {
    const ends = (block.lines ?? []).flatMap((l) => [l.value, l.low, l.high]);
    for (const s of block.series) for (const p of s.points) ends.push(...p.slice(1));
    const known = ends.filter((v) => v !== null && v !== undefined);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    const pad = (high - low) * .08 || .05;   // above, names of checkpoints stand
    return [block.percent ? Math.max(-.02, low - pad) : low - pad, high + 2 * pad];
  };

  const build = () => {
    u?.destroy();
    const log = block.log === true, plain = block.series.some((s) => s.look === "interval") || block.lines?.length;
    const axis = { stroke: ink, grid: { stroke: "rgba(128,128,128,.22)", width: 1 }, ticks: { stroke: "rgba(128,128,128,.5)", size: 4 },
      font: "11px system-ui, sans-serif" };
    const bars = block.series.some((s) => s.look === "bars");
    const xs = columns[0], spread = xs.length > 1 ? xs[xs.length - 1] - xs[0] : 1;
    const end = bars && block.log_x ? (xs.length > 1 ? Math.sqrt(xs[1] / xs[0]) : 2) : 1;   // of a bar, on a log axis
    const sides = bars ? (xs.length > 1 ? (xs[1] - xs[0]) / 2 : .5) : plain ? spread * .06 : 0;
    let pressed = null;
    u = new uPlot({
      width: Math.max(160, plot.clientWidth || 300), height: block.height ?? 170,
      legend: { show: false },
      cursor: { sync: block.sync ? { key: block.sync, setSeries: false, scales: ["x", null] } : undefined,
        y: false, drag: { x: true, y: false, setScale: !block.drag }, points: { size: 7 } },
      scales: {
        x: { time: false, distr: block.log_x ? 3 : 1, range: end > 1 ? (u, low, high) => [low / end, high * end] : sides ? (u, low, high) => [low - sides, high + sides]
          : (u, low, high) => low === high ? [low - 1, high + 1] : [low, high] },
        y: { distr: log ? 3 : 1, range: log ? undefined : plain ? range
          : bars ? (u, low, high) => [0, high * 1.05 || 1] : undefined } },
      axes: [{ ...axis, size: 26, incrs: WHOLE, filter: (u, ticks) => ticks,
        splits: block.log_x ? (u, n, low, high) => WHOLE.filter((v) => low <= v && v <= high) : plain && xs.length <= 12 ? () => xs : undefined, values: (u, ticks) => ticks.map((v) => Number.isInteger(v) ? format(v) : "") },
        { ...axis, size: 52, space: (block.height ?? 170) < 120 ? 18 : 30, values: (u, ticks) => ticks.map((v) => v === null || (block.percent && v > 1) ? "" : show(v)) }],
      series: [{}, ...block.shown.map((s) => ({
        label: s.label, scale: "y", stroke: s.ink, width: s.faint ? 1 : 1.8, spanGaps: true, dash: s.dashed ? [6, 4] : undefined,
        points: s.look === "bars" ? { show: false } : { show: s.look === "interval" || s.points.length < 25, size: s.look === "interval" ? 8 : 5, fill: s.ink },
        fill: s.look === "bars" ? s.ink : undefined,
        paths: s.look === "bars" ? uPlot.paths.bars({ size: [.9, 60], align: 0 }) : undefined }))],
      hooks: {
        draw: [paint], setCursor: [tell],
        setSelect: [(u) => {
          if (!block.drag || u.select.width < 3) return;
          const [a, b] = [u.select.left, u.select.left + u.select.width].map((p) => u.posToVal(p, "x"));
          session.send(block.drag, [Math.max(0, Math.round(a)), Math.round(b)]);
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
      },
    }, columns, plot);
    u.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    u.over.addEventListener("click", (event) => {
      if (!block.click || u.cursor.idx == null || Math.abs(event.clientX - pressed) > 3) return;
      session.send(block.click, columns[0][u.cursor.idx]);
    });
    if (block.drag) u.over.addEventListener("dblclick", () => session.send(block.drag, null));
    node.onkeydown = (event) => {   // ← and → go from point to point, Enter does what a click does
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }, last = columns[0].length - 1;
      const at = u.cursor.idx;
      if (event.key === "Enter" && block.click && at != null) session.send(block.click, columns[0][at]);
      else if (event.key in moves && last >= 0) {
        const k = Math.min(last, Math.max(0, (at ?? (moves[event.key] < 0 ? last + 1 : -1)) + moves[event.key]));
        u.setCursor({ left: u.valToPos(columns[0][k], "x"), top: 1 });
      } else return;
      event.preventDefault();
      event.stopPropagation();
    };
    u.over.style.cursor = block.click ? "pointer" : "crosshair";
  };

  const update = (next) => {
    block = next;
    const counts = block.series.map((s) => `${s.name}, ${s.points.length} ${s.points.length === 1 ? "point" : "points"}`).join("; ");
    node.setAttribute("aria-label", `${block.title}: ${counts}. ← and → read the values${block.click ? ", Enter opens them" : ""}`);
    title.textContent = block.title + (block.log ? ", log scale" : "");
    const positive = (s) => block.log ? { ...s, points: s.points.filter((p) => p[1] > 0) } : s;
    const series = block.series.map(positive);
    columns = align(series);
    block.shown = [];
    series.forEach((s, k) => {
      const values = columns[k + 1], line = s.look !== "bars" && s.look !== "interval";
      const smooth = line && block.smooth > 0 && s.points.length > 4;
      const alpha = smooth ? "55" : s.look === "bars" ? "aa" : "";
      block.shown.push({ ...s, label: s.name, values, faint: smooth, ink: colour(k) + alpha });
      if (smooth) block.shown.push({ ...s, label: `${s.name}, smoothed (EMA ${block.smooth})`, values: smoothed(values, block.smooth), ink: colour(k), look: "line" });
    });
    const data = [columns[0], ...block.shown.map((s) => s.values)];
    const now = JSON.stringify([block.log, block.shown.map((s) => [s.label, s.ink, s.points.length < 25]), theme(), block.drag, block.log_x, block.sync]);
    columns = data;
    if (u && now === shape) {
      const x = u.scales.x, old = u.data[0], zoomed = old.length && (x.min > old[0] || x.max < old[old.length - 1]);
      u.setData(data, !zoomed || block.series[0]?.look === "bars");
      if (zoomed) u.redraw();
    } else { shape = now; build(); }
    tell();
  };

  const size = new ResizeObserver(() => {
    const width = plot.clientWidth;
    if (u && width > 50 && Math.abs(width - u.width) > 1) u.setSize({ width, height: u.height });
  });
  size.observe(plot);
  const recolour = () => update(block);
  session.root.addEventListener("sft-theme", recolour);
  const destroy = () => {
    size.disconnect();
    session.root.removeEventListener("sft-theme", recolour);
    u?.destroy();
  };
  return { node, update, destroy };
}
