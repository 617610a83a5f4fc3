/* Images, texts and histograms that the user logged: a figure for each name, with a slider over its steps. */
const Media = (function () {
  "use strict";
  const { data, t } = Charts;
  const byId = (id) => document.getElementById(id);
  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text) element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  const figures = new Map();

  /* One series for each name and type, with the runs that have it and their steps. */
  function seriesOf() {
    const found = new Map();
    data.runs.forEach((run, index) => (run.media || []).forEach((each) => {
      const key = each.type + " " + each.name;
      if (!found.has(key)) found.set(key, { key, name: each.name, type: each.type, runs: [] });
      found.get(key).runs.push([index, each]);
    }));
    return [...found.values()];
  }
  function draw() {
    const home = byId("media"), all = seriesOf();
    if (!home) return;
    byId("media-section").hidden = !all.length;
    for (const [key, figure] of figures) if (!all.some((each) => each.key === key)) {
      figure.root.remove();
      figures.delete(key);
    }
    for (const series of all) {
      if (!figures.has(series.key)) {
        figures.set(series.key, figureOf(series));
        home.append(figures.get(series.key).root);
      }
      figures.get(series.key).renew(series);
    }
  }
  function figureOf(first) {
    const root = make("figure", "", "logged " + first.type), caption = make("figcaption"), place = make("output", "", "read");
    const slider = make("input"), cells = make("div", "", "cells");
    let steps = [], series = first;
    slider.type = "range";
    slider.min = 0;
    slider.ariaLabel = "step of " + first.name;
    caption.append(make("b", first.name), place);
    root.append(caption, slider, cells);
    slider.addEventListener("input", show);
    function show() {
      const step = steps[slider.valueAsNumber];
      place.textContent = t("step") + " " + step.toLocaleString("en");
      slider.setAttribute("aria-valuetext", place.textContent);
      series.runs.forEach(([index, each], i) => {
        const at = each.steps.findLastIndex((one) => one <= step);
        showIn(cells.children[i], index, each, at, step);
      });
    }
    function renew(next) {
      const wasLast = slider.valueAsNumber === steps.length - 1 || !steps.length, before = steps[slider.valueAsNumber];
      series = next;
      steps = [...new Set(series.runs.flatMap(([, each]) => each.steps))].sort((a, b) => a - b);
      slider.max = steps.length - 1;
      slider.value = wasLast ? steps.length - 1 : Math.max(0, steps.indexOf(before));
      slider.hidden = steps.length < 2;
      while (cells.children.length < series.runs.length) cells.append(make("div"));
      while (cells.children.length > series.runs.length) cells.lastChild.remove();
      const missing = series.runs.map(([, each]) => each.total - each.steps.length).reduce((a, b) => a + b, 0);
      root.title = missing ? "this report has " + steps.length + " of the steps; trainwright serve shows all" : "";
      show();
    }
    return { root, renew };
  }

  /* Fill a cell with the value that run `index` logged at each.steps[at], its newest step up to that of the slider. */
  function showIn(cell, index, each, at, step) {
    const shown = index + ":" + (at < 0 ? "" : each.steps[at]);
    if (cell.dataset.shown === shown) return;
    cell.dataset.shown = shown;
    const words = [data.runs.length > 1 ? data.runs[index].name : "", at >= 0 && each.steps[at] !== step ? t("step") + " " + each.steps[at] : "", at >= 0 ? each.captions[at] : ""].filter(Boolean);
    const caption = words.length ? [make("p", words.join(" \u00b7 "), "quiet")] : [];
    const put = (content) => cell.dataset.shown === shown && cell.replaceChildren(...caption, content);
    if (at < 0) return put(make("p", "-", "quiet"));
    if (each.contents) return put(elementOf(each, each.contents[at], words));
    const query = new URLSearchParams({ run: data.runs[index].id, name: each.name, type: each.type, step: each.steps[at] });
    if (each.type === "image") return put(elementOf(each, "media?" + query, words));
    fetch("media?" + query)
      .then((answer) => (answer.ok ? (each.type === "text" ? answer.text() : answer.json()) : answer.text().then((problem) => ({ problem }))))
      .then((content) => put(elementOf(each, content, words)), () => put(make("p", t("the server does not answer"), "reason")));
  }
  function elementOf(each, content, words) {
    if (content.problem) return make("p", content.problem, "reason");
    if (each.type === "text") return make("pre", content, "written");
    if (each.type === "histogram") return barsOf(content);
    const image = make("img");
    image.src = content;
    image.alt = [each.name, ...words].join(", ");
    image.addEventListener("error", () => image.replaceWith(make("p", t("This image cannot be read."), "reason")));
    image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth < 200));
    return image;
  }
  function barsOf({ edges, counts, not_finite: notFinite }) {
    const [width, height] = [320, 120], most = Math.max(1, ...counts), name = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(name, "svg"), path = document.createElementNS(name, "path");
    const total = counts.reduce((sum, each) => sum + each, 0), range = [edges[0], edges[edges.length - 1]].map(Charts.short);
    path.setAttribute("d", counts.map((each, i) => "M" + (i * width) / counts.length + " " + height + "v" + -(each / most) * height + "h" + width / counts.length + "V" + height).join(""));
    svg.setAttribute("viewBox", "0 0 " + width + " " + height);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", "histogram of " + total + " values from " + range.join(" to ") + ", at most " + most + " in a bin");
    svg.append(path);
    const axis = make("div", "", "ends quiet"), box = make("div", "", "bars");
    axis.append(make("span", range[0]), make("span", total.toLocaleString("en") + " " + t("values") + (notFinite ? ", " + notFinite + " " + t("not finite") : "")), make("span", range[1]));
    box.append(svg, axis);
    return box;
  }
  return { draw };
})();
