/* The curves of a page: drawn with uPlot, kept up to date in place, read by mouse and keyboard. */
const Charts = (function () {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const t = (text) => (data.words && data.words[text]) || text; /* a text in the language of the page */
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();

  function short(value) {
    if (value == null) return "-";
    const size = Math.abs(value);
    if (size >= 1e15 || (size && size < 1e-3)) return value.toExponential(2).replace(/\.?0+e/, "e");
    for (const [unit, at] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]])
      if (size >= at) return +(value / (unit === "k" ? 1e3 : at)).toPrecision(4) + unit;
    return String(+value.toPrecision(4));
  }
  const bytes = (v) => (v == null ? "-" : v >= 2 ** 30 ? +(v / 2 ** 30).toPrecision(4) + " GiB" : +(v / 2 ** 20).toPrecision(3) + " MiB");
  const percent = (v) => (v == null ? "-" : (100 * v).toFixed(0) + " %");
  const unit = (name) => (v) => (v == null ? "-" : short(v) + " " + name);
  const number = (v) => typeof v === "number";

  /* Values of a column: null is missing (undefined for uPlot, which draws on), "n" is not finite (null, a gap). */
  const plottable = (values) => values.map((v) => (v === null ? undefined : v === "n" ? null : v));
  const shareOf = (a, b) => a && b && a.map((v, i) => (number(v) && number(b[i]) ? (b[i] > 0 ? v / b[i] : 0) : null));

  /* Units of work per second of a step: by the counters if there are any, else steps. */
  const counts = (c) => (c.tokens && c.tokens.some((v) => v > 0) ? c.tokens : c.samples);
  const unitOf = (c) => (c.tokens && c.tokens.some((v) => v > 0) ? "tokens/s" : c.samples ? "samples/s" : "steps/s");
  function speed(columns) {
    const count = counts(columns), steps = columns.step, took = columns.step_s;
    const grown = (i) => (i > 0 && i < steps.length && steps[i] > steps[i - 1] && number(count[i]) && number(count[i - 1]) ? (count[i] - count[i - 1]) / (steps[i] - steps[i - 1]) : null);
    return took && took.map((s, i) => {
      if (!number(s) || s <= 0) return null;
      if (!count) return 1 / s;
      const work = grown(i) === null ? grown(i + 1) : grown(i);
      return work === null ? null : work / s;
    });
  }

  /* The charts. "of" returns label, x values, y values and style of each series of a run. */
  const CURVES = [
    { name: "loss", tall: true, smooth: true, of: (run) => [["loss", run.columns, run.columns.loss, {}], ["validation", run.evaluations, run.evaluations.loss, { strong: true }]] },
    { name: "gradient norm", log: true, smooth: true, of: (run) => [["gradient norm", run.columns, run.columns.grad_norm, {}]] },
    { name: "learning rate", of: (run) => [["learning rate", run.columns, run.columns.lr, {}]] },
    { name: "throughput", smooth: true, zero: true, title: (runs) => unitOf(runs[0].columns), of: (run) => [["throughput", run.columns, speed(run.columns), {}]] },
    { name: "waiting for data", smooth: true, format: percent, range: [0, 1], of: (run) => [["waiting for data", run.columns, shareOf(run.columns.wait_s, run.columns.step_s), {}]] },
    { name: "memory", format: bytes, zero: true, of: (run, alone) => [["memory", run.columns, run.columns.mem_bytes, {}], ["predicted", run.columns, alone && run.planned_bytes && run.columns.step && run.columns.step.map(() => run.planned_bytes), { dashed: true }]] },
    { name: "skipped updates", zero: true, hideZero: true, of: (run) => [["skipped updates", run.columns, run.columns.skipped, {}]] },
  ];
  const READINGS = {
    busy_percent: ["GPU busy", unit("%")],
    memory_bytes: ["GPU memory", bytes],
    temperature_celsius: ["GPU temperature", unit("\u00b0C")],
    power_watts: ["GPU power", unit("W")],
    energy_joules: ["GPU energy", unit("J")],
    sm_clock_mhz: ["GPU clock", unit("MHz")],
    memory_clock_mhz: ["clock of the GPU's memory", unit("MHz")],
    pcie_sent_bytes_s: ["PCIe sent per second", bytes],
    pcie_received_bytes_s: ["PCIe received per second", bytes],
    nvlink_sent_bytes_s: ["NVLink sent per second", bytes],
    nvlink_received_bytes_s: ["NVLink received per second", bytes],
    ecc_uncorrected: ["uncorrected ECC errors", short],
    reserved_bytes: ["reserved by the allocator", bytes],
    allocated_bytes: ["allocated", bytes],
    allocator_retries: ["retries of the allocator", short],
    process_cpu_percent: ["CPU of the process", unit("%")],
    process_memory_bytes: ["memory of the process", bytes],
    available_memory_bytes: ["free memory of the machine", bytes],
    disk_free_bytes: ["free disk", bytes],
  };
  function readingsOf(run) {
    const devices = {};
    for (const name of Object.keys(run.readings || {})) {
      const [device, leaf] = [name.slice(0, name.indexOf("/")), name.slice(name.indexOf("/") + 1)];
      if (name.includes("/")) (devices[leaf] = devices[leaf] || []).push([device, name]);
    }
    const known = Object.keys(READINGS), place = (leaf) => (known.indexOf(leaf) + 1 || known.length + 1);
    return Object.keys(devices).sort((a, b) => place(a) - place(b)).map((leaf) => {
      const [title, format] = READINGS[leaf] || [leaf, short];
      return { name: title, format, zero: true, isReading: true, of: () => devices[leaf].map(([device, name], ink) => [device, run.readings, run.readings[name], { ink }]) };
    });
  }

  /* The part of a name before its last "/", or its first "." if there is none, if at least two names have it. */
  function prefixOf(name, names) {
    const cut = (each) => (each.includes("/") ? each.slice(0, each.lastIndexOf("/")) : each.includes(".") ? each.slice(0, each.indexOf(".")) : "");
    const prefix = cut(name);
    return prefix && [...names].filter((each) => cut(each) === prefix).length > 1 ? prefix : "";
  }

  /* Metrics, and figures that the user logs: one chart for each, with a curve for each set, grouped by prefix. */
  function figuresOf(runs) {
    const names = new Set(runs.flatMap((run) => (run.figures || []).map((each) => each.name)));
    const inGroups = (a, b) => (a.group === b.group ? 0 : !a.group ? -1 : !b.group ? 1 : a.group < b.group ? -1 : 1);
    const placed = (run, { step, value }) => ({ step, value, [axis]: step.map((each) => placeOf(run, each)) });
    return [...names].map((name) => ({
      name: name === "loss" ? "loss by set" : name,
      group: prefixOf(name, names),
      of: (run, alone) => {
        const found = (run.figures || []).find((each) => each.name === name);
        return (found ? found.series : []).map((each, i) => [each.label, placed(run, each), each.value, { set: each.label, marked: each.is_evaluation, ink: alone ? (each.is_evaluation ? Math.max(1, i) : 0) : undefined }]);
      },
    })).sort(inGroups);
  }

  /* Panels of the user: all curves whose metric has one of the names, in which * matches any text. */
  const metricsOf = (run) => [...CURVES, ...figuresOf([run]), ...readingsOf(run)].flatMap((chart) =>
    chart.of(run, true).filter(([, , values]) => values).map(([label, side, values, look]) => ({ name: label === chart.name ? label : label + " " + chart.name, side, values, look })));
  const names = () => [...new Set(data.runs.flatMap(metricsOf).map((each) => each.name))];
  function panelsOf() {
    const matches = (names) => new RegExp("^(?:" + names.map((name) => name.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replace(/\*/g, ".*")).join("|") + ")$");
    return (data.panels || []).map(({ name, metrics }) => ({
      name,
      of: (run, alone) => metricsOf(run).filter((each) => matches(metrics).test(each.name)).map((each, i) =>
        [each.name, each.side, each.values, { set: each.name, marked: each.look.marked || each.look.strong, ink: alone ? i : undefined, dash: alone ? undefined : DASHES[i % 3] }]),
    }));
  }

  /* Statistics by layer: a colour for each layer and step, on a log scale. */
  const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
  const rampAt = (share) => {
    const at = Math.min(RAMP.length - 1.001, Math.max(0, share * (RAMP.length - 1))), i = Math.floor(at);
    return RAMP[i].map((v, c) => v + (at - i) * (RAMP[i + 1][c] - v));
  };
  const [NOT_FINITE, NOT_THERE, STEPS] = [65535, 65534, 65533];
  const LEAST_COLUMN = 14; /* pixels of a column of a map that has few */
  function heatsOf(run) {
    return (run.layers || []).flatMap(({ layers, steps, maps }) => maps.map((map) => {
      const raw = Uint8Array.from(atob(map.codes), (each) => each.charCodeAt(0)), codes = new Uint16Array(raw.buffer);
      return { name: map.name, heat: { ...map, codes, layers, steps }, of: () => [] };
    }));
  }
  const heatValue = ({ codes, layers, low, high }, column, layer) => {
    const code = codes[column * layers.length + layer];
    return code === NOT_FINITE ? null : code === NOT_THERE ? undefined : low * (high / low) ** (code / STEPS);
  };
  function bitmapOf({ codes, layers, steps }) {
    const canvas = document.createElement("canvas"), wrong = colour("--critical").match(/\w\w/g).map((v) => parseInt(v, 16));
    [canvas.width, canvas.height] = [steps.length, layers.length];
    const ctx = canvas.getContext("2d"), image = ctx.createImageData(steps.length, layers.length);
    codes.forEach((code, i) => {
      const at = 4 * ((i % layers.length) * steps.length + Math.floor(i / layers.length));
      image.data.set([...(code === NOT_FINITE ? wrong : rampAt(code / STEPS)), code === NOT_THERE ? 0 : 255], at);
    });
    ctx.putImageData(image, 0, 0);
    return canvas;
  }
  function paintHeat(u) {
    const { left, top, width, height } = u.bbox, xs = u.data[0], ctx = u.ctx;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.imageSmoothingEnabled = false;
    const edges = xs.map((x, i) => u.valToPos(i ? (x + xs[i - 1]) / 2 : x, "x", true)).concat([u.valToPos(xs[xs.length - 1], "x", true)]);
    const least = LEAST_COLUMN * devicePixelRatio; /* of a short run, which has few columns; of others, it is less than they have */
    for (let i = 0; i < xs.length; i++) {
      const wide = Math.max(xs.length < 8 ? least : 1, edges[i + 1] - edges[i] + 0.5), from = Math.min(edges[i], left + width - wide);
      if (edges[i + 1] >= left && edges[i] <= left + width)
        ctx.drawImage(u.heat.bitmap, i, 0, 1, u.heat.layers.length, from, top, wide, height);
    }
    ctx.restore();
  }
  function readHeat(u) {
    const { idx, top } = u.cursor, layer = Math.floor(u.posToVal(top, "y"));
    const isIn = idx != null && top >= 0 && layer >= 0 && layer < u.heat.layers.length;
    const value = isIn ? heatValue(u.heat, idx, layer) : undefined;
    u.caption[0](isIn ? u.heat.layers[layer] + " at " + axis + " " + short(u.data[0][idx]) + ": " + (value === undefined ? "-" : value === null ? "not finite" : short(value)) : "");
  }
  function heatCaption(caption, { low, high }) {
    const scale = document.createElement("span"), ramp = document.createElement("span"), place = document.createElement("span");
    ramp.className = "ramp";
    scale.className = place.className = "read";
    scale.append(short(low) + " ", ramp, " " + short(high));
    caption.append(scale, place);
    return [(text) => (place.textContent = text)];
  }

  /* Smoothed curves: the mean over a window of steps around each point. Near both ends the window is smaller, so that it
     stays symmetric: a curve is not displaced. Rows of a long log are extremes; for it, means of all records are used. */
  const smoothing = () => byId("smooth").valueAsNumber / 100;
  function smoothedOf(chart, run, alone, x) {
    if (!chart.smooth || !smoothing()) return null;
    const means = run.means || {}, side = run.is_thinned ? means : run.columns;
    if (!side[x] || !side.step || side.step.length < 8) return null;
    const values = chart.of({ ...run, columns: side, evaluations: {} }, alone)[0][2];
    return values && [side[x], smoothed(side.step, plottable(values), smoothing())];
  }
  function smoothed(steps, values, share) {
    const last = steps.length - 1, half = (share * (steps[last] - steps[0])) / 2, sums = [0], counts = [0];
    values.forEach((v, i) => { sums.push(sums[i] + (number(v) ? v : 0)); counts.push(counts[i] + (number(v) ? 1 : 0)); });
    let low = 0, high = 0;
    return values.map((v, i) => {
      const reach = Math.min(half, steps[i] - steps[0], steps[last] - steps[i]);
      while (steps[low] < steps[i] - reach) low++;
      while (high <= last && steps[high] <= steps[i] + reach) high++;
      return number(v) ? (sums[high] - sums[low]) / (counts[high] - counts[low]) : v;
    });
  }
  function tellSmoothing() {
    const longest = Math.max(...data.runs.map((run) => ((run.columns.step || []).at(-1) || 0) - ((run.columns.step || [])[0] || 0)));
    const window = Math.max(1, Math.round(smoothing() * longest));
    byId("smooth-steps").textContent = smoothing() && window > 1 ? short(window) + " " + t("steps") : t("off");
  }

  const WHOLE = Array.from({ length: 16 }, (_, i) => [1, 2, 5].map((each) => each * 10 ** i)).flat();
  const POWERS = Array.from({ length: 40 }, (_, i) => 2 ** (i + 10));
  const FEW = 4; /* runs of which each value is told, and each raw curve drawn, too */
  const DASHES = [undefined, [8, 3], [3, 3]];
  const hidden = new Set();
  let plots = [], drawn = "", zoom = null, span = null, axis = "step", following = false;

  function tableOf(chart, x) {
    if (chart.heat) {
      const { steps, layers } = chart.heat, xs = steps.map((each) => placeOf(data.runs[0], each));
      return [[xs, xs.map(() => layers.length / 2)], [{}, { label: chart.name, stroke: "transparent", points: { show: false } }]];
    }
    const tables = [], series = [{}], alone = data.runs.length === 1, drawnAs = new Map();
    data.runs.forEach((run, index) => {
      if (hidden.has(index)) return;
      for (const [label, side, values, look] of chart.of(run, alone)) {
        if (!values || !side[x] || !values.some((v) => v !== null)) continue;
        if (chart.hideZero && !values.some((v) => v > 0)) continue;
        if (chart.isReading && values.filter(number).length < 2) continue;
        const placed = side[x].map(number), kept = (each) => each.filter((_, i) => placed[i]);
        const [xs, ys] = [kept(side[x]), kept(plottable(values))];
        const hue = look.ink === undefined ? index : look.ink;
        const ink = colour(look.dashed ? "--quiet" : alone && look.strong ? "--c1" : "--c" + (hue % 8));
        const name = alone ? label : run.name + (look.strong ? " validation" : look.set ? " " + look.set : ""), isMarked = look.strong || look.marked;
        const even = look.strong ? null : smoothedOf(chart, run, alone, x);
        const shape = alone ? "" : xs.join() + ":" + ys.join(), same = drawnAs.get(shape);
        if (!alone && !same) drawnAs.set(shape, { name, count: 0 });
        if (!alone && same) same.count++;
        const line = { label: name, ink, sameAs: !alone && same ? same.name : "", dash: !alone && same ? [5, 5 + 4 * same.count] : look.dashed ? [6, 4] : look.dash ? look.dash : isMarked && !alone ? [2, 3] : DASHES[Math.floor(index / 8) % 3], points: { show: !!isMarked || ys.filter(number).length === 1, size: 6, fill: ink } };
        const isRead = data.runs.length - hidden.size <= FEW;
        if (!even || isRead) tables.push([xs, ys]);
        if (!even || isRead) series.push({ ...line, stroke: even ? ink + "66" : ink, width: isMarked ? 2 : even ? 1 : 1.25, broken: ys.some((v) => v === null), isRead, isHollow: isMarked && !alone, points: even || ys.length > 200 ? { ...line.points, show: !!isMarked && ys.length < 100 } : line.points });
        if (even) {
          tables.push(even);
          series.push({ ...line, label: name + " smoothed", stroke: ink, width: 2, points: { show: false }, isRead: false });
        }
      }
    });
    return tables.length ? [uPlot.join(tables, tables.map(() => [1, 1])), series] : null;
  }

  /* All charts of a page. If their list is unchanged they get new data; otherwise all are created again. */
  function draw() {
    const box = byId("charts");
    if (!box) return;
    axis = usableAxis();
    tellSmoothing();
    const width = Math.max(280, box.clientWidth), across = width >= 1000 ? 3 : width >= 640 ? 2 : 1;
    const machine = byId("machine") ? readingsOf(data.runs[0]) : [];
    const wanted = [];
    const heats = byId("layers") ? heatsOf(data.runs[0]) : [], figures = figuresOf(data.runs);
    if (byId("layers")) byId("layers-section").hidden = !heats.length;
    byId("metrics-section").hidden = !figures.length;
    const panels = panelsOf();
    byId("panels-section").hidden = !panels.length;
    for (const [home, charts] of [[box, CURVES], [byId("panels"), panels], [byId("metrics"), figures], [byId("layers"), heats], [byId("machine"), machine]])
      for (const chart of charts) {
        const found = tableOf(chart, axis);
        if (found) wanted.push({ home, chart, table: found[0], series: found[1], isLog: isLog(chart, found[0]), width: chart.tall ? width : Math.floor((width - 16 * (across - 1)) / across) });
      }
    if (byId("machine")) byId("machine-section").hidden = !wanted.some((each) => each.home === byId("machine"));
    const ends = wanted.map((each) => each.table[0]);
    span = ends.length ? { min: Math.min(...ends.map((xs) => xs[0])), max: Math.max(...ends.map((xs) => xs[xs.length - 1])) } : null;
    const look = JSON.stringify([axis, colour("--ink"), wanted.map((each) => [each.chart.name, each.width, each.isLog, each.series.map((s) => [s.label, s.stroke, s.width, s.points])])]);
    if (look === drawn) wanted.forEach((each, i) => renew(plots[i], each));
    else rebuild(wanted);
    drawn = look;
    if (!wanted.length) box.textContent = t("No step was recorded yet.");
  }
  function usableAxis() {
    const select = byId("x"), has = (x) => x === "step" || data.runs.some((run) => run.columns[x] && run.columns[x].some((v) => v > 0));
    for (const option of select.options) option.hidden = option.disabled = !has(option.value);
    return has(select.value) ? select.value : "step";
  }
  const isLog = (chart, table) => !!(chart.log || (chart.tall && byId("log").checked)) && table.slice(1).every((values) => values.every((v) => v == null || v > 0));

  function rebuild(wanted) {
    plots.forEach((plot) => plot.destroy());
    byId("charts").replaceChildren();
    for (const id of ["panels", "metrics", "layers", "machine"]) if (byId(id)) byId(id).replaceChildren();
    let group = "";
    plots = wanted.map((each) => {
      if (each.chart.group && each.chart.group !== group) {
        const heading = document.createElement("h3");
        heading.className = "group";
        heading.textContent = each.chart.group;
        each.home.append(heading);
      }
      group = each.chart.group || "";
      return plotOf(each);
    });
  }
  function renew(plot, { chart, table, series }) {
    if (chart.heat) plot.heat = { ...chart.heat, bitmap: bitmapOf(chart.heat) };
    plot.broken = series.map((each) => each.broken);
    plot.setData(table, false);
    if (plot.pins) addPins(plot);
    show(plot);
  }
  function show(plot) {
    following = true;
    plot.setScale("x", zoom || span);
    following = false;
    read(plot);
  }

  function plotOf({ home, chart, table, series, isLog, width }) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption");
    figure.className = chart.tall ? "chart tall" : "chart";
    figure.style.width = width + "px";
    figure.tabIndex = 0;
    figure.setAttribute("aria-label", chart.name + " over " + axis);
    caption.textContent = t(chart.name) + (chart.title ? ", " + chart.title(data.runs) : "");
    const saves = document.createElement("span");
    saves.className = "saves";
    for (const kind of chart.heat ? [] : ["PNG", "SVG"]) {
      const button = document.createElement("button");
      [button.type, button.className, button.textContent] = ["button", "save", kind];
      button.ariaLabel = "Save " + chart.name + " as " + kind;
      button.addEventListener("click", () => saveAs(kind, chart.name, plot));
      saves.append(button, " ");
    }
    figure.append(caption);
    home.append(figure);
    const line = { stroke: colour("--line"), width: 1 };
    const look = { stroke: colour("--quiet"), grid: line, ticks: line, font: "12px system-ui, sans-serif" };
    const say = chart.format || short;
    const plot = new uPlot({
      width, height: chart.tall ? Math.min(344, Math.max(244, width / 2)) : chart.heat ? 254 : 184,
      series, legend: { show: false },
      scales: {
        x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { distr: isLog ? 3 : 1, dir: chart.heat ? -1 : 1, range: chart.heat ? () => [0, chart.heat.layers.length] : chart.range ? () => chart.range : (u, low, high) => (isLog ? spanOfLog(low, high) : spanOf(low, high, chart)) },
      },
      axes: [
        { ...look, size: 30, label: t(axis), labelSize: 16, labelGap: 0, labelFont: look.font, incrs: axis === "seconds" ? undefined : WHOLE, values: (u, ticks) => ticks.map((v) => (v == null ? "" : short(v))) },
        chart.heat ? { ...look, size: 110, grid: { show: false }, splits: () => chart.heat.layers.map((_, i) => i + 0.5).filter((_, i) => i % Math.ceil(chart.heat.layers.length / 12) === 0), values: (u, ticks) => ticks.map((v) => chart.heat.layers[Math.floor(v)].slice(-16) || "model") } : { ...look, size: 68, incrs: chart.format === bytes ? POWERS : undefined, values: (u, ticks) => ticks.map((v) => (v == null ? "" : say(v))) },
      ],
      cursor: { sync: { key: "runs", setSeries: false }, drag: { x: true, y: false }, points: { size: 7 } },
      hooks: {
        setScale: [(u, key) => key === "x" && follow(u)],
        setCursor: [read],
        drawAxes: [chart.tall ? markReferences : chart.heat ? paintHeat : () => {}],
        draw: [markBroken, chart.tall ? markPins : () => {}],
        init: [(u) => (u.heat = chart.heat && { ...chart.heat, bitmap: bitmapOf(chart.heat) })],
      },
    }, table, figure);
    plot.broken = series.map((each) => each.broken);
    plot.inks = series.map((each) => each.stroke);
    plot.caption = chart.heat ? heatCaption(caption, chart.heat) : captionOf(caption, series, say);
    caption.append(saves);
    figure.setAttribute("aria-label", chart.name + " over " + axis + summaryOf(table, series, say));
    if (chart.tall) addPins(plot);
    figure.addEventListener("keydown", (event) => onKey(plot, event));
    show(plot);
    return plot;
  }

  /* For screen readers: the first, last, least and greatest value of each curve. */
  function summaryOf(table, series, say) {
    return series.map((each, s) => {
      const values = s && each.isRead ? table[s].map((v, i) => [v, table[0][i]]).filter(([v]) => number(v)) : [];
      if (!values.length) return "";
      const low = values.reduce((a, b) => (b[0] < a[0] ? b : a)), high = values.reduce((a, b) => (b[0] > a[0] ? b : a));
      const [first, last] = [values[0], values[values.length - 1]].map(([v]) => say(v));
      return "; " + each.label + " from " + first + " to " + last + ", least " + say(low[0]) + " at " + short(low[1]) + ", greatest " + say(high[0]) + " at " + short(high[1]);
    }).join("");
  }

  /* A chart as a file, as it is shown: PNG with the pixels of the screen, SVG with its curves, axes and names. */
  function saveAs(kind, name, plot) {
    const save = (blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = name.replace(/[^\w.-]+/g, "-") + "." + kind.toLowerCase();
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    };
    if (kind === "SVG") return save(new Blob([svgOf(name, plot)], { type: "image/svg+xml" }));
    const from = plot.ctx.canvas, canvas = document.createElement("canvas"), ctx = canvas.getContext("2d");
    [canvas.width, canvas.height] = [from.width, from.height];
    ctx.fillStyle = colour("--page");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.drawImage(from, 0, 0);
    canvas.toBlob(save);
  }
  function svgOf(name, plot) {
    const safe = (text) => String(text).replace(/[&<>"]/g, (each) => "&#" + each.charCodeAt(0) + ";");
    const [size, { left, top, width, height }] = [devicePixelRatio, plot.bbox], px = (v) => +(v / size).toFixed(1);
    const at = (value, scale) => px(plot.valToPos(value, scale, true));
    const lines = plot.series.map((each, s) => {
      if (!s || !plot.inks[s]) return "";
      let path = "", isOn = false;
      plot.data[s].forEach((v, i) => {
        const x = plot.data[0][i];
        if (v === undefined || x < plot.scales.x.min || x > plot.scales.x.max) return;
        if (v !== null) path += (isOn ? "L" : "M") + at(x, "x") + " " + at(v, "y");
        isOn = v !== null;
      });
      return '<path d="' + path + '" fill="none" stroke="' + safe(plot.inks[s]) + '" stroke-width="' + each.width + '"><title>' + safe(each.label) + "</title></path>";
    });
    const ends = ["x", "y"].flatMap((scale) => [plot.scales[scale].min, plot.scales[scale].max].map((v) => {
      const [x, y, anchor] = scale === "x" ? [at(v, "x"), px(top + height) + 16, v === plot.scales.x.min ? "start" : "end"] : [px(left) - 4, at(v, "y") + 4, "end"];
      return '<text x="' + x + '" y="' + y + '" text-anchor="' + anchor + '">' + safe(short(v)) + "</text>";
    }));
    const box = '<rect x="' + px(left) + '" y="' + px(top) + '" width="' + px(width) + '" height="' + px(height) + '" fill="none" stroke="' + colour("--line") + '"/>';
    const titles = '<text x="8" y="14" font-weight="600">' + safe(name) + '</text><text x="' + px(left + width / 2) + '" y="' + (px(top + height) + 16) + '" text-anchor="middle">' + axis + "</text>";
    return '<svg xmlns="http://www.w3.org/2000/svg" width="' + plot.width + '" height="' + (plot.height + 18) + '" font-family="system-ui, sans-serif" font-size="12" fill="' + colour("--ink") + '"><rect width="100%" height="100%" fill="' + colour("--page") + '"/>' + titles + '<g transform="translate(0 18)">' + box + lines.join("") + ends.join("") + "</g></svg>";
  }

  /* Beside the name of a chart: the value of each curve at the cursor, or the last one. */
  function captionOf(caption, series, say) {
    return series.map((each) => {
      if (!each.isRead) return null;
      const place = document.createElement("span"), swatch = document.createElement("span"), value = document.createElement("b");
      place.className = "read";
      swatch.className = each.isHollow ? "swatch hollow" : "swatch";
      swatch.style.color = each.ink;
      const isNamed = data.runs.length === 1 && series.filter((one) => one.isRead).length > 1;
      place.append(swatch, isNamed ? t(each.label) + " " : "", value, each.sameAs ? " (as " + each.sameAs + ")" : "");
      place.title = each.label + (each.sameAs ? ": the same values as " + each.sameAs + ", drawn dashed over it" : "");
      caption.append(place);
      return (v) => (value.textContent = v === undefined ? "" : v === null ? t("not finite") : say(v));
    }).concat([placeOfReading(caption)]);
  }
  function placeOfReading(caption) {
    const place = document.createElement("span");
    place.className = "read";
    caption.append(place);
    return (v) => (place.textContent = v === null ? "" : "at " + axis + " " + short(v));
  }
  function read(u) {
    if (!u.caption) return;
    if (u.heat) return readHeat(u);
    const idx = u.cursor.idx, from = idx == null ? u.data[0].length - 1 : idx;
    u.caption.forEach((tell, s) => {
      if (!tell) return;
      if (s === u.series.length) return tell(idx == null ? null : u.data[0][idx]);
      let at = from;
      while (at > 0 && u.data[s][at] === undefined) at--;
      tell(u.data[s][at]);
    });
  }

  function spanOfLog(low, high) {
    if (low == null) return [1, 10];
    return low === high ? [low / 10, high * 10] : uPlot.rangeLog(low, high, 10, false);
  }
  function spanOf(low, high, chart) {
    if (low == null) return [0, 1];
    if (chart.tall) {
      const near = 0.3 * (high - low), marks = references().map(([, v]) => v).filter((v) => v > low - near && v < high + near);
      [low, high] = [Math.min(low, ...marks), Math.max(high, ...marks)];
    }
    if (chart.zero) low = Math.min(low, 0);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [chart.zero && low === 0 ? 0 : low - room, high + room];
  }

  /* Reference losses, such as that of a guess, as dashed lines; none if runs differ in them. */
  function references() {
    const [first, ...others] = data.runs.map((run) => JSON.stringify(run.references || {}));
    return others.every((each) => each === first) ? Object.entries(JSON.parse(first)) : [];
  }
  function markReferences(u) {
    const ctx = u.ctx, size = devicePixelRatio, { left, top, width, height } = u.bbox;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("--quiet");
    ctx.font = 11 * size + "px system-ui, sans-serif";
    ctx.textAlign = "right";
    ctx.setLineDash([4 * size, 4 * size]);
    for (const [name, value] of references()) {
      const y = u.valToPos(value, "y", true);
      if (!(y >= top && y <= top + height)) continue;
      ctx.beginPath();
      ctx.moveTo(left, y);
      ctx.lineTo(left + width, y);
      ctx.stroke();
      ctx.fillText(t(name) + " " + short(value), left + width - 4 * size, y - 4 * size < top + 11 * size ? y + 12 * size : y - 4 * size);
    }
    ctx.restore();
  }
  /* A value that is not finite leaves a gap; a mark at the bottom shows the reason. */
  function markBroken(u) {
    const ctx = u.ctx, size = devicePixelRatio;
    ctx.save();
    ctx.fillStyle = colour("--critical");
    for (let s = 1; s < u.series.length; s++) {
      if (!u.broken || !u.broken[s]) continue;
      u.data[s].forEach((value, i) => {
        const at = u.data[0][i];
        if (value !== null || at < u.scales.x.min || at > u.scales.x.max) return;
        ctx.fillRect(u.valToPos(at, "x", true) - size, u.bbox.top + u.bbox.height - 9 * size, 2 * size, 9 * size);
      });
    }
    ctx.restore();
  }

  function follow(from) {
    const { min, max } = from.scales.x;
    if (following || min == null) return;
    setZoom(min <= span.min && max >= span.max ? null : { min, max }, from);
  }
  function setZoom(to, from) {
    zoom = to;
    if (byId("whole")) byId("whole").disabled = !zoom;
    for (const plot of plots) if (plot !== from) show(plot);
  }
  const showAll = () => setZoom(null);

  function onKey(plot, event) {
    const keys = { ArrowLeft: -1, ArrowRight: 1 }, all = plot.data[0];
    const { min, max } = plot.scales.x;
    if (event.target !== plot.root.parentElement || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in keys) {
      const step = Math.max(1, Math.round((plot.valToIdx(max) - plot.valToIdx(min)) / 100));
      const now = plot.cursor.idx == null ? plot.valToIdx(min) : plot.cursor.idx;
      const next = Math.min(all.length - 1, Math.max(0, now + step * keys[event.key]));
      plot.root.previousElementSibling.setAttribute("aria-live", "polite");
      plot.setCursor({ left: plot.valToPos(all[next], "x"), top: plot.over.clientHeight / 2 });
    } else if (event.key === "+" || event.key === "-") {
      const middle = plot.cursor.idx == null ? (min + max) / 2 : all[plot.cursor.idx];
      const factor = event.key === "+" ? 0.5 : 2;
      const [low, high] = [Math.max(span.min, middle - (middle - min) * factor), Math.min(span.max, middle + (max - middle) * factor)];
      setZoom(low <= span.min && high >= span.max ? null : { min: low, max: high });
    } else if (event.key === "0") showAll();
    else return;
    event.preventDefault();
  }

  /* Pins: findings, resumes and out-of-memory errors on the loss curve; as buttons, for the keyboard, too. */
  function addPins(u) {
    const pins = data.runs.flatMap((run, index) => (hidden.has(index) ? [] : run.pins.map((pin) => [run, index, pin])));
    const told = JSON.stringify(pins.map(([, index, pin]) => [index, pin]));
    if (u.pinsTold !== told) {
      (u.pins || []).forEach(([button]) => button.remove());
      u.pins = pins.map(([run, index, pin]) => [pinOf(run, index, pin), 0]);
      u.pinsTold = told;
    }
    u.pins = u.pins.map(([button], i) => [button, placeOf(pins[i][0], pins[i][2].step)]);
  }
  function pinOf(run, index, pin) {
    const button = document.createElement("button"), leads = pin.finding !== null;
    button.type = "button";
    button.className = "pin " + pin.kind;
    button.title = (data.runs.length > 1 ? run.name + ": " : "") + pin.label + (leads ? " (step " + pin.step + ")" : "");
    button.textContent = leads ? String(pin.finding + 1) : pin.kind === "resume" ? "\u21bb" : "!";
    button.ariaLabel = button.textContent + " " + button.title;
    button.setAttribute("aria-disabled", String(!leads));
    button.addEventListener("click", () => open(index, pin));
    return button;
  }
  function placeOf(run, step) {
    if (axis === "step" || !run.columns[axis]) return step;
    const at = run.columns.step.findIndex((each) => each >= step);
    return run.columns[axis][at < 0 ? run.columns.step.length - 1 : at];
  }
  function markPins(u) {
    if (!u.pins) return;
    const rows = [], ctx = u.ctx, size = devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = colour("--edge");
    ctx.setLineDash([2 * size, 3 * size]);
    for (const [button, at] of u.pins) {
      const left = u.valToPos(at, "x");
      if (!button.isConnected) u.over.append(button);
      button.hidden = !(left >= -1 && left <= u.over.clientWidth + 1);
      let row = rows.findIndex((end) => left - end > 20);
      if (row < 0) row = rows.push(-100) - 1;
      if (button.hidden) continue;
      rows[row] = left;
      button.style.left = Math.max(10, Math.min(u.over.clientWidth - 10, left)) + "px";
      button.style.top = 2 + 22 * Math.min(row, 6) + "px";
      ctx.beginPath();
      ctx.moveTo(u.valToPos(at, "x", true), u.bbox.top);
      ctx.lineTo(u.valToPos(at, "x", true), u.bbox.top + u.bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }
  function open(index, pin) {
    const card = pin.finding === null ? null : byId("finding-" + index + "-" + pin.finding);
    if (!card) return;
    for (let up = card.parentElement; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
    const evidence = card.querySelector("details");
    if (evidence) evidence.open = true;
    document.querySelectorAll(".finding.open").forEach((each) => each.classList.remove("open"));
    card.classList.add("open");
    card.scrollIntoView({ block: "center" });
    card.focus({ preventScroll: true });
  }

  /* For several runs: buttons with their names, which hide and show a run in all charts. */
  function listRuns() {
    const place = byId("legend");
    if (!place) return;
    data.runs.forEach((run, index) => {
      const button = document.createElement("button"), swatch = document.createElement("span");
      button.type = "button";
      swatch.className = "swatch s" + (index % 8);
      button.append(swatch, run.name);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        hidden.has(index) ? hidden.delete(index) : hidden.add(index);
        button.setAttribute("aria-pressed", String(!hidden.has(index)));
        draw();
      });
      place.append(button);
    });
  }

  function begin() {
    listRuns();
    byId("x").addEventListener("change", () => { setZoom(null); draw(); });
    byId("log").addEventListener("change", draw);
    byId("smooth").addEventListener("input", draw);
    byId("whole").addEventListener("click", showAll);
    let width = innerWidth, waiting = 0;
    addEventListener("resize", () => {
      if (innerWidth === width) return;
      width = innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(draw, 100);
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    draw();
  }
  return { data, draw, begin, names, short, t };
})();
