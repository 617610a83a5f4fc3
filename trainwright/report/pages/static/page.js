/* A page: keeps a live one up to date, and lists the runs. Written by hand: there is nothing to build. */
(function () {
  "use strict";
  const data = Charts.data;
  const live = document.body.hasAttribute("data-live");
  const { t } = Charts;
  const byId = (id) => document.getElementById(id);
  const MOST_ROWS = 12000;

  /* A live page: updates come by server-sent events, or by polling if those do not get through. */
  function say(text) {
    const place = byId("link");
    if (place) place.textContent = t(text);
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
      if (fresh.readings || fresh.layers || fresh.pins.length !== run.pins.length || (fresh.evaluations.step || []).length !== (run.evaluations.step || []).length || pointsOf(fresh) !== pointsOf(run)) redraw = true;
      const { pins, evaluations, figures, planned_bytes, references, means } = fresh;
      Object.assign(run, { read: Math.max(run.read, fresh.read), pins, evaluations, figures, planned_bytes, references, means, readings: fresh.readings || run.readings, layers: fresh.layers || run.layers, media: fresh.media || run.media });
    });
    if ((message.runs || []).some((fresh) => fresh.media)) Media.draw();
    for (const [id, html] of Object.entries(message.parts || {})) replace(id, html);
    if (message.rows !== undefined) showRuns(message.rows);
    if (redraw) Charts.draw();
  }
  const pointsOf = (run) => (run.figures || []).flatMap((each) => each.series).reduce((sum, each) => sum + (each.step || []).length, 0);
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
    const active = document.activeElement, held = place.contains(active) ? active.id || active.parentElement.dataset.keep : null;
    place.innerHTML = html;
    place.querySelectorAll("details").forEach((each) => {
      each.open = opened.includes(each.dataset.keep);
      if (held && each.dataset.keep === held) each.querySelector("summary").focus();
    });
    if (held && byId(held)) byId(held).focus({ preventScroll: true });
    reachWide();
  }
  function query() {
    const asked = new URLSearchParams();
    (data.runs || []).forEach((run) => {
      asked.append("run", run.id);
      asked.append("after", (run.columns.step || []).length > MOST_ROWS ? "" : run.log + ":" + run.read);
    });
    return asked;
  }
  /* A browser has six connections to a server, and each page with an event stream takes one; with more, no page could
     be loaded. So a hidden page has no stream, and once all seats are taken the other pages poll. */
  const SEATS = 4;
  function seat(number, then) {
    if (!navigator.locks) return then(() => {});
    navigator.locks.request("listens-" + number, { ifAvailable: true }, (lock) => {
      if (lock) return new Promise((leave) => then(leave));
      number + 1 < SEATS ? seat(number + 1, then) : then(null);
    });
  }
  function listen() {
    let source = null, leave = null, timer = 0, turn = 0, failures = 0;
    let asks = new URLSearchParams(location.search).has("poll") || !window.EventSource;
    const address = (what) => (data.runs ? what + "?" + query() : "runs-" + what);
    function close() {
      turn += 1;
      clearTimeout(timer);
      if (source) source.close();
      if (leave) leave();
      source = leave = null;
    }
    function begin() {
      close();
      if (document.hidden) return;
      const mine = turn;
      if (asks) return ask(mine);
      seat(0, (given) => {
        if (mine !== turn) return given && given();
        leave = given;
        given ? connect() : ask(mine);
      });
    }
    function ask(mine) {
      fetch(address("data"), { cache: "no-store" })
        .then((answer) => (answer.ok ? answer.json() : Promise.reject()))
        .then((message) => mine === turn && take(message), () => say("the server does not answer"))
        .then(() => mine === turn && (timer = setTimeout(begin, 2000)));
    }
    function connect() {
      source = new EventSource(address("events"));
      source.onmessage = (event) => {
        failures = 0;
        take(JSON.parse(event.data));
      };
      source.onerror = () => {
        close();
        say("the server does not answer");
        asks = ++failures >= 3;
        timer = setTimeout(begin, 1000);
      };
    }
    begin();
    addEventListener("pagehide", close);
    addEventListener("visibilitychange", begin);
  }

  /* The list of all runs: sorted, filtered, some chosen. */
  let order = null;
  function showRuns(html) {
    const body = byId("runs").tBodies[0];
    const chosen = new Set([...body.querySelectorAll("input:checked")].map((each) => each.value));
    const active = document.activeElement, row = body.contains(active) ? active.closest("tr").dataset.name : null;
    body.innerHTML = html;
    body.querySelectorAll("input").forEach((each) => (each.checked = chosen.has(each.value)));
    if (row !== null) {
      const again = [...body.rows].find((each) => each.dataset.name === row);
      if (again) again.querySelector(active.tagName).focus({ preventScroll: true });
    }
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
    const isEmpty = (i) => [...body.rows].every((row) => row.cells[i].classList.contains("nil"));
    const isHidden = columnNames().map((name, i) => unshown.has(name) || (name === "left" && isEmpty(i)));
    for (const row of [byId("runs").tHead.rows[0], ...body.rows]) [...row.cells].forEach((cell, i) => (cell.hidden = isHidden[i]));
    for (const row of body.rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    byId("compare").disabled = body.querySelectorAll("input:checked").length < 2;
    const shown = [...body.rows].filter((row) => !row.hidden), told = (count, what) => (count ? [count + " " + t(what)] : []);
    const counts = ["running", "failed", "killed"].flatMap((state) => told(shown.filter((row) => row.dataset.state === state).length, state));
    counts.push(...told(shown.filter((row) => +row.dataset.findings).length, "with findings"));
    const count = [shown.length + t(shown.length === 1 ? " run" : " runs"), ...counts].join(" \u00b7 ");
    if (byId("count").textContent !== count) byId("count").textContent = count;
  }
  /* The columns that are shown; the choice is kept in this browser. The name of a run is always there. */
  const KEPT = "trainwright-columns";
  const columnNames = () => [...byId("runs").tHead.rows[0].cells].map((cell) => cell.dataset.name);
  let unshown = new Set(["duration", "learning rate"]);
  function chooseColumns() {
    try {
      unshown = new Set(JSON.parse(localStorage.getItem(KEPT)) || unshown);
    } catch { /* not allowed, or written by another program: the default */ }
    const place = byId("columns").querySelector("div");
    for (const name of columnNames().filter((each) => each !== "choose" && each !== "run")) {
      const label = document.createElement("label"), box = document.createElement("input");
      [box.type, box.checked] = ["checkbox", !unshown.has(name)];
      box.addEventListener("change", () => {
        box.checked ? unshown.delete(name) : unshown.add(name);
        try {
          localStorage.setItem(KEPT, JSON.stringify([...unshown]));
        } catch { /* not allowed: it is kept until the page is left */ }
        arrange();
      });
      label.append(box, " " + byId("runs").tHead.rows[0].cells[columnNames().indexOf(name)].textContent);
      place.append(label);
    }
  }
  function listRuns() {
    chooseColumns();
    keep(byId("add-columns"), ({ columns }) => ({ columns: listOf(columns.value) }), () => location.reload());
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

  /* What the user chooses for the folder of the runs: tags, notes, panels, columns. Only a live page can change it. */
  const listOf = (text) => text.split(",").map((each) => each.trim()).filter(Boolean);
  const panelsOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean).map((line) => {
    const cut = line.indexOf(":"), metrics = listOf(line.slice(cut + 1));
    return { name: cut > 0 ? line.slice(0, cut).replace(/,/g, " ").trim() : metrics.join(" "), metrics };
  });
  function keep(form, changeOf, then) {
    const status = form.querySelector("[role=status]");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const change = changeOf(form.elements);
      fetch("marks", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(change) })
        .then((answer) => (answer.ok ? "" : answer.text()), () => "the server does not answer")
        .then((problem) => {
          status.textContent = problem || t("kept");
          if (!problem) then(change);
        });
    });
  }
  function keepMarks() {
    document.querySelectorAll(".marks form").forEach((form) => {
      keep(form, ({ tags, note }) => ({ run: data.runs[form.dataset.index].id, tags: listOf(tags.value), note: note.value }), () => {});
    });
    const panels = byId("panels-form");
    if (!panels) return;
    const form = panels.querySelector("form");
    form.elements.panels.value = (data.panels || []).map(({ name, metrics }) => name + ": " + metrics.join(", ")).join("\n");
    keep(form, ({ panels }) => ({ run: data.runs[0].id, panels: panelsOf(panels.value) }), (change) => {
      data.panels = change.panels;
      Charts.draw();
    });
    panels.addEventListener("toggle", () => {
      panels.querySelector(".names").textContent = Charts.names().join(", ");
      reachWide();
    });
  }

  /* Tables and code that overflow can be scrolled with the keyboard. */
  function reachWide() {
    document.querySelectorAll(".wide, pre, .names").forEach((each) => {
      each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight ? (each.tabIndex = 0) : each.removeAttribute("tabindex");
    });
  }
  reachWide();
  addEventListener("resize", reachWide);
  document.addEventListener("toggle", reachWide, true);

  if (data.runs) {
    addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
    keepMarks();
    Charts.begin();
    Media.draw();
  } else {
    listRuns();
    arrange();
  }
  if (live) listen();
})();
