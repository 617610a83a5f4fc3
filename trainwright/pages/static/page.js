/* Draws the curves of a page, and keeps a live page up to date. Written by hand: there is nothing to build. */
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const live = document.body.hasAttribute("data-live");
  const byId = (id) => document.getElementById(id);
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const MOST_ROWS = 12000;

  function short(value) {
    if (value == null) return "-";
    const size = Math.abs(value);
    if (size >= 1e15 || (size && size < 1e-3)) return value.toExponential(2);
    for (const [unit, at] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]])
      if (size >= at) return +(value / (unit === "k" ? 1e3 : at)).toPrecision(4) + unit;
    return String(+value.toPrecision(4));
  }
  const bytes = (v) => (v == null ? "-" : v >= 2 ** 30 ? (v / 2 ** 30).toFixed(2) + " GiB" : +(v / 2 ** 20).toPrecision(3) + " MiB");
  const percent = (v) => (v == null ? "-" : (100 * v).toFixed(0) + " %");

  /* Of a column: null is missing (undefined for uPlot, which draws on), "n" is not finite (null, a gap). */
  function plottable(values, length) {
    if (!values) return new Array(length).fill(undefined);
    return values.map((v) => (v === null ? undefined : v === "n" ? null : v));
  }
  const number = (v) => typeof v === "number";
  const map2 = (a, b, f) => a.map((v, i) => (number(v) && b && number(b[i]) ? f(v, b[i]) : null));

  const rate = (c) => (c.tokens && c.tokens.some((v) => v > 0) ? c.tokens : c.samples);
  function speed(columns) {
    /* Units of work for each second of a step: by the counters where there are any, else steps. */
    const count = rate(columns), steps = columns.step, took = columns.step_s;
    if (!took) return null;
    return took.map((s, i) => {
      if (!number(s) || s <= 0) return null;
      if (!count || i === 0 || !number(count[i]) || steps[i] <= steps[i - 1]) return count && i < took.length - 1 && steps[i + 1] > steps[i] ? (count[i + 1] - count[i]) / (steps[i + 1] - steps[i]) / s : count ? null : 1 / s;
      return (count[i] - count[i - 1]) / (steps[i] - steps[i - 1]) / s;
    });
  }
  const unitOf = (c) => (c.tokens && c.tokens.some((v) => v > 0) ? "tokens/s" : c.samples ? "samples/s" : "steps/s");

  const CHARTS = [
    { name: "loss", tall: true, of: (run) => [["loss", run.columns, run.columns.loss, {}], ["validation", run.evaluations, run.evaluations.loss, { points: true, strong: true }]] },
    { name: "gradient norm", log: true, of: (run) => [["gradient norm", run.columns, run.columns.grad_norm, {}]] },
    { name: "learning rate", of: (run) => [["learning rate", run.columns, run.columns.lr, {}]] },
    { name: "throughput", title: (runs) => unitOf(runs[0].columns), of: (run) => [["throughput", run.columns, speed(run.columns), {}]] },
    { name: "waiting for data", format: percent, range: [0, 1], of: (run) => [["waiting", run.columns, run.columns.wait_s && map2(run.columns.wait_s, run.columns.step_s, (w, s) => (s > 0 ? w / s : 0)), {}]] },
    { name: "memory", format: bytes, zero: true, of: (run, alone) => [["memory", run.columns, run.columns.mem_bytes, {}], ["foreseen", run.columns, alone && run.planned_bytes && run.columns.step.map(() => run.planned_bytes), { dashed: true }]] },
    { name: "skipped updates", zero: true, hideZero: true, of: (run) => [["skipped", run.columns, run.columns.skipped, {}]] },
  ];

  const POWERS = Array.from({ length: 40 }, (_, i) => 2 ** (i + 10));
  let plots = [], zoom = null;

  function tableOf(chart, runs, x) {
    const tables = [], series = [{}];
    runs.forEach((run, index) => {
      for (const [label, side, values, look] of chart.of(run, runs.length === 1)) {
        if (!values || !side[x] || !values.some((v) => v !== null)) continue;
        if (chart.hideZero && !values.some((v) => v > 0)) continue;
        const placed = side[x].map(number);
        tables.push([side[x], plottable(values)].map((each) => each.filter((_, i) => placed[i])));
        const ink = colour(look.dashed ? "--quiet" : runs.length === 1 && look.strong ? "--c1" : "--c" + (index % 8));
        series.push({
          label: runs.length === 1 ? label : run.name + (look.strong ? " validation" : ""),
          stroke: ink, width: look.strong ? 2 : 1.25, dash: look.dashed ? [6, 4] : look.strong && runs.length > 1 ? [2, 3] : undefined,
          points: look.points ? { show: true, size: 6, fill: ink } : undefined,
          value: (u, v, s, idx) => (idx == null || v === undefined ? "" : v === null ? "not finite" : (chart.format || short)(v)),
          broken: values.some((v) => v === "n"),
        });
      }
    });
    return tables.length ? [uPlot.join(tables, tables.map(() => [1, 1])), series] : null;
  }

  function draw() {
    const box = byId("charts");
    if (!box) return;
    const runs = data.runs, x = byId("x").value;
    const width = Math.max(280, box.clientWidth);
    const wide = width >= 900;
    plots.forEach((plot) => plot.destroy());
    plots = [];
    box.replaceChildren();
    const usable = runs.some((run) => run.columns[x] && run.columns[x].some(number)) ? x : "step";
    for (const chart of CHARTS) {
      const found = tableOf(chart, runs, usable);
      if (!found) continue;
      const figure = document.createElement("figure");
      figure.className = chart.tall ? "chart tall" : "chart";
      figure.tabIndex = 0;
      figure.setAttribute("aria-label", chart.name + " over " + usable);
      const caption = document.createElement("figcaption");
      caption.textContent = chart.name + (chart.title ? ", " + chart.title(runs) : "");
      figure.append(caption);
      box.append(figure);
      const plot = plotOf(chart, found, usable, figure, chart.tall || !wide ? width : Math.floor((width - 16) / 2));
      figure.addEventListener("keydown", (event) => onKey(plot, event));
      plots.push(plot);
    }
    if (!plots.length) box.textContent = "No step was recorded yet.";
  }

  function plotOf(chart, [table, series], x, figure, width) {
    const isLog = chart.log || (chart.name === "loss" && byId("log").checked);
    const positive = table.slice(1).every((values) => values.every((v) => v == null || v > 0));
    const axis = { stroke: colour("--ink"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
    const options = {
      width, height: chart.tall ? Math.min(380, Math.max(240, width / 2)) : 200,
      series: series.map((each, index) => (index ? each : { label: x, value: (u, v) => (v == null ? "" : short(v)) })),
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: isLog && positive ? 3 : 1, range: chart.range ? () => chart.range : (u, low, high) => (isLog && positive ? spanOfLog(low, high) : spanOf(low, high, chart.zero)) },
      },
      axes: [
        { ...axis, values: (u, ticks) => ticks.map((v) => (v == null ? "" : short(v))) },
        { ...axis, size: 64, incrs: chart.format === bytes ? POWERS : undefined, values: (u, ticks) => ticks.map((v) => (v == null ? "" : (chart.format || short)(v))) },
      ],
      legend: { live: true },
      cursor: { sync: { key: "runs", setSeries: false }, drag: { x: true, y: false } },
      hooks: {
        ready: [(u) => chart.tall && addPins(u, x)],
        setScale: [(u, key) => key === "x" && follow(u, x)],
        draw: [markBroken, (u) => placePins(u, x)],
      },
    };
    const plot = new uPlot(options, table, figure);
    if (zoom && zoom.x === x) plot.setScale("x", zoom);
    return plot;
  }

  function spanOfLog(low, high) {
    if (low == null) return [1, 10];
    return low === high ? [low / 10, high * 10] : uPlot.rangeLog(low, high, 10, false);
  }
  function spanOf(low, high, zero) {
    if (low == null) return [0, 1];
    if (zero) low = 0;
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [zero ? 0 : low - room, high + room];
  }

  /* Where a value is not finite the curve has a gap: a mark at its foot says why. */
  function markBroken(u) {
    const ctx = u.ctx, size = devicePixelRatio;
    ctx.save();
    ctx.fillStyle = colour("--critical");
    for (let s = 1; s < u.series.length; s++) {
      if (!u.series[s].show || !u.series[s].broken) continue;
      u.data[s].forEach((value, i) => {
        const at = u.data[0][i];
        if (value !== null || at < u.scales.x.min || at > u.scales.x.max) return;
        ctx.fillRect(u.valToPos(at, "x", true) - size, u.bbox.top + u.bbox.height - 9 * size, 2 * size, 9 * size);
      });
    }
    ctx.restore();
  }

  let following = false;
  function follow(from, x) {
    const { min, max } = from.scales.x;
    if (following || min == null) return;
    const all = from.data[0];
    zoom = min <= all[0] && max >= all[all.length - 1] ? null : { x, min, max };
    following = true;
    for (const plot of plots) if (plot !== from) plot.setScale("x", zoom || { min: plot.data[0][0], max: plot.data[0][plot.data[0].length - 1] });
    following = false;
  }
  function showAll() {
    zoom = null;
    following = true;
    for (const plot of plots) plot.setScale("x", { min: plot.data[0][0], max: plot.data[0][plot.data[0].length - 1] });
    following = false;
  }

  function onKey(plot, event) {
    const keys = { ArrowLeft: -1, ArrowRight: 1 };
    const { min, max } = plot.scales.x;
    if (event.target !== plot.root.parentElement || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in keys) {
      const all = plot.data[0];
      const step = Math.max(1, Math.round((plot.valToIdx(max) - plot.valToIdx(min)) / 100));
      const now = plot.cursor.idx == null ? plot.valToIdx(min) : plot.cursor.idx;
      const next = Math.min(all.length - 1, Math.max(0, now + step * keys[event.key]));
      plot.setCursor({ left: plot.valToPos(all[next], "x"), top: plot.over.clientHeight / 2 });
    } else if (event.key === "+" || event.key === "-") {
      const middle = plot.cursor.idx == null ? (min + max) / 2 : plot.data[0][plot.cursor.idx];
      const factor = event.key === "+" ? 0.5 : 2, all = plot.data[0];
      plot.setScale("x", { min: Math.max(all[0], middle - (middle - min) * factor), max: Math.min(all[all.length - 1], middle + (max - middle) * factor) });
    } else if (event.key === "0") showAll();
    else return;
    event.preventDefault();
  }

  /* Pins: findings, resumes and shortages of memory on the curve of the loss; buttons, for the keyboard, too. */
  function addPins(u, x) {
    u.pins = [];
    data.runs.forEach((run, index) => {
      for (const pin of run.pins) {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "pin " + pin.kind;
        button.title = button.ariaLabel = (data.runs.length > 1 ? run.name + ": " : "") + pin.label + (pin.finding === null ? "" : " (step " + pin.step + ")");
        button.textContent = pin.finding === null ? (pin.kind === "resume" ? "\u21bb" : "!") : String(pin.finding + 1);
        button.addEventListener("click", () => open(index, pin));
        u.over.append(button);
        u.pins.push([button, placeOf(run, pin.step, x)]);
      }
    });
    placePins(u, x);
  }
  function placeOf(run, step, x) {
    if (x === "step" || !run.columns[x]) return step;
    const at = run.columns.step.findIndex((each) => each >= step);
    return run.columns[x][at < 0 ? run.columns.step.length - 1 : at];
  }
  function placePins(u) {
    if (!u.pins) return;
    const rows = [];
    for (const [button, at] of u.pins) {
      const left = u.valToPos(at, "x");
      button.hidden = !(left >= -1 && left <= u.over.clientWidth + 1);
      let row = rows.findIndex((end) => left - end > 20);
      if (row < 0) row = rows.push(-100) - 1;
      if (!button.hidden) rows[row] = left;
      button.style.left = Math.max(10, Math.min(u.over.clientWidth - 10, left)) + "px";
      button.style.top = 2 + 22 * Math.min(row, 6) + "px";
    }
  }
  function open(index, pin) {
    if (pin.finding === null) return;
    const card = byId("finding-" + index + "-" + pin.finding);
    if (!card) return;
    for (let up = card.parentElement; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
    document.querySelectorAll(".finding.open").forEach((each) => each.classList.remove("open"));
    card.classList.add("open");
    card.scrollIntoView({ block: "center" });
    card.focus({ preventScroll: true });
  }

  /* A live page: what is new comes by server-sent events, or is asked for where those do not get through. */
  function say(text) {
    const place = byId("link");
    if (place) place.textContent = text;
  }
  function take(message) {
    say("live");
    let redraw = false;
    (message.runs || []).forEach((fresh) => {
      const index = fresh.index, run = data.runs[index];
      if (fresh.log !== run.log || fresh.resumes !== run.resumes || fresh.whole) {
        data.runs[index] = fresh;
        redraw = true;
        return;
      }
      if (fresh.read > run.read) redraw = append(run, fresh) || redraw;
      if (fresh.pins.length !== run.pins.length || (fresh.evaluations.step || []).length !== (run.evaluations.step || []).length) redraw = true;
      Object.assign(run, { read: Math.max(run.read, fresh.read), pins: fresh.pins, evaluations: fresh.evaluations, planned_bytes: fresh.planned_bytes });
    });
    for (const [id, html] of Object.entries(message.parts || {})) replace(id, html);
    if (message.rows !== undefined) showRuns(message.rows);
    if (redraw) draw();
  }
  function append(run, fresh) {
    const added = (fresh.columns.step || []).length;
    if (!added) return false;
    const had = (run.columns.step || []).length;
    for (const name of new Set([...Object.keys(run.columns), ...Object.keys(fresh.columns)])) {
      const column = run.columns[name] || new Array(had).fill(null);
      run.columns[name] = column.concat(fresh.columns[name] || new Array(added).fill(null));
    }
    const steps = run.columns.step;
    if (had && steps[had] < steps[had - 1]) {
      const order = steps.map((_, i) => i).sort((a, b) => steps[a] - steps[b] || a - b);
      for (const name in run.columns) run.columns[name] = order.map((i) => run.columns[name][i]);
    }
    return true;
  }
  function replace(id, html) {
    const place = byId(id);
    if (!place) return;
    const opened = [...place.querySelectorAll("details[open]")].map((each) => each.dataset.keep);
    place.innerHTML = html;
    place.querySelectorAll("details").forEach((each) => (each.open = opened.includes(each.dataset.keep)));
  }
  function query() {
    const asked = new URLSearchParams();
    (data.runs || []).forEach((run) => {
      asked.append("run", run.id);
      asked.append("after", (run.columns.step || []).length > MOST_ROWS ? "" : run.log + ":" + run.read);
    });
    return asked;
  }
  function listen() {
    let source = null, failures = 0;
    const address = (what) => (data.runs ? what + "?" + query() : "runs-" + what);
    function poll() {
      fetch(address("data"), { cache: "no-store" })
        .then((answer) => (answer.ok ? answer.json() : Promise.reject()))
        .then(take, () => say("the server does not answer"))
        .then(() => setTimeout(poll, 2000));
    }
    function connect() {
      source = new EventSource(address("events"));
      source.onmessage = (event) => {
        failures = 0;
        take(JSON.parse(event.data));
      };
      source.onerror = () => {
        source.close();
        say("the server does not answer");
        if (++failures < 3) setTimeout(connect, 1000);
        else poll();
      };
    }
    if (new URLSearchParams(location.search).has("poll") || !window.EventSource) poll();
    else connect();
    addEventListener("pagehide", () => source && source.close());
  }

  /* The list of all runs: sorted, filtered, some chosen. */
  let order = null;
  function showRuns(html) {
    const body = byId("runs").tBodies[0];
    const chosen = new Set([...body.querySelectorAll("input:checked")].map((each) => each.value));
    const focused = document.activeElement && body.contains(document.activeElement) ? document.activeElement.value : null;
    body.innerHTML = html;
    body.querySelectorAll("input").forEach((each) => {
      each.checked = chosen.has(each.value);
      if (focused && each.value === focused) each.focus();
    });
    byId("none").hidden = body.rows.length > 0;
    arrange();
  }
  function arrange() {
    const body = byId("runs").tBodies[0], words = byId("filter").value.toLowerCase().split(/\s+/);
    if (order) {
      const key = (row) => row.cells[order.column].dataset.value;
      const compare = (a, b) => (isNaN(+a) || isNaN(+b) ? a.localeCompare(b) : a - b);
      [...body.rows].sort((a, b) => order.sign * compare(key(a), key(b))).forEach((row) => body.append(row));
    }
    for (const row of body.rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    byId("compare").disabled = body.querySelectorAll("input:checked").length < 2;
  }
  function listRuns() {
    byId("filter").addEventListener("input", arrange);
    byId("runs").tBodies[0].addEventListener("change", arrange);
    byId("runs").querySelectorAll("th").forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        order = { column, sign: order && order.column === column ? -order.sign : 1 };
        byId("runs").querySelectorAll("th[aria-sort]").forEach((each) => each.setAttribute("aria-sort", "none"));
        head.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
        arrange();
      });
    });
    byId("compare").addEventListener("click", () => {
      const chosen = [...byId("runs").querySelectorAll("tbody input:checked")].map((each) => ["run", each.value]);
      location.href = "view?" + new URLSearchParams(chosen);
    });
  }

  if (data.runs) {
    byId("x").addEventListener("change", () => { zoom = null; draw(); });
    byId("log").addEventListener("change", draw);
    byId("whole").addEventListener("click", showAll);
    let width = innerWidth, waiting = 0;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(draw, 100);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
    draw();
  } else listRuns();
  if (live) listen();
})();
