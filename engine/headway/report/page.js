"use strict";
// Draws the document in #data; in a page with data-live it asks for a newer one again and again.
// Every word of the run goes in as text, never as HTML.
(() => {
  const byId = (id) => document.getElementById(id);
  const axes = { step: "update", elapsed_s: "seconds since the first ticket" };
  let current = JSON.parse(byId("data").textContent);

  function element(name, text, className) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }

  // Sums over stretches of rows; `bins` has the last row of each.
  function binned(column) {
    let from = 0;
    return current.bins.map((last) => {
      const sum = column.slice(from, last + 1).reduce((total, value) => total + value, 0);
      from = last + 1;
      return sum;
    });
  }

  function resolve(trace, axis) {
    const { binned: inBins, ...drawn } = trace;
    if (!trace.y.column) return drawn;
    const x = current.columns[axis], y = current.columns[trace.y.column];
    drawn.x = inBins ? current.bins.map((last) => x[last]) : x;
    drawn.y = inBins ? binned(y) : y;
    return drawn;
  }

  function place(figure) {
    if (byId("plot-" + figure.id)) return;
    const section = element("section", undefined, figure.wide ? "wide" : "");
    const plot = element("div", undefined, "plot");
    plot.id = "plot-" + figure.id;
    section.append(element("h2", figure.title), element("p", figure.note, "note"), plot);
    byId("figures").append(section);
  }

  function draw() {
    const axis = byId("axis").value;
    current.figures.forEach(place); // all of them first: a plot takes the width that is left to it
    for (const figure of current.figures) {
      const own = figure.traces.some((trace) => trace.x);
      const layout = {
        margin: { l: 55, r: 55, t: 10, b: 40 }, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, hovermode: "x unified", showlegend: true,
        uirevision: axis, xaxis: own ? {} : { title: { text: axes[axis] } }, ...structuredClone(figure.layout),
      };
      const traces = figure.traces.map((trace) => resolve(trace, axis));
      Plotly.react(byId("plot-" + figure.id), traces, layout, { responsive: true, displaylogo: false });
    }
  }

  function tell() {
    byId("name").textContent = current.name;
    byId("bottleneck").textContent = current.bottleneck + "; " + current.what_if;
    byId("lines").replaceChildren(...current.lines.map((line) => element("li", line)));
    byId("tables").replaceChildren(...current.tables.filter((table) => table.rows.length).map((table) => {
      const section = element("section");
      const body = element("table");
      const row = (cells, kind) => {
        const made = element("tr");
        made.append(...cells.map((cell) => element(kind, cell)));
        return made;
      };
      body.append(row(table.head, "th"), ...table.rows.map((cells) => row(cells, "td")));
      section.append(element("h2", table.title), body);
      return section;
    }));
  }

  function show() {
    tell();
    draw();
    document.body.dataset.drawn = String((current.columns.step || []).length);
  }

  async function follow() {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (!answer.ok) throw new Error("status " + answer.status);
      current = await answer.json();
      byId("state").textContent = current.ended ? "The run has ended." : "Live.";
      show();
    } catch (error) {
      byId("state").textContent = "headway watch does not answer (" + error.message + "); the figures stand still.";
    }
    if (!current.ended) setTimeout(follow, Number(document.body.dataset.live));
  }

  byId("axis").addEventListener("change", draw);
  show();
  if (document.body.dataset.live) follow();
})();
