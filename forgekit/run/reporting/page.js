"use strict";
// Points at the step under the pointer. Values come from the lines themselves, to a ten-thousandth of the axis.
for (const figure of document.querySelectorAll("figure[data-x]")) {
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg"), out = plot.querySelector("output");
  const [x0, x1] = figure.dataset.x.split(" ").map(Number), [y0, y1] = figure.dataset.y.split(" ").map(Number);
  const value = (y) => figure.dataset.log ? y0 * (y1 / y0) ** (1 - y / 1000) : y0 + (y1 - y0) * (1 - y / 1000);
  const show = (v) => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(4)));
  let lines, cursor;
  const read = () => [...svg.querySelectorAll("path[data-label]")].map((path) => ({
    label: path.dataset.label,
    points: [...path.getAttribute("d").matchAll(/[ML]([-\d.]+) ([-\d.]+)/g)].map((m) => [+m[1], +m[2]]),
  }));
  plot.addEventListener("pointermove", (event) => {
    lines ??= read();
    const box = plot.getBoundingClientRect(), x = 1000 * (event.clientX - box.left) / box.width;
    const near = lines.map(({ label, points }) => [label, points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)]);
    const at = near.reduce((a, b) => Math.abs(b[1][0] - x) < Math.abs(a[1][0] - x) ? b : a)[1][0];
    if (!cursor) {
      cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
      cursor.setAttribute("class", "cursor");
      svg.append(cursor);
    }
    cursor.setAttribute("d", `M${at} 0V1000`);
    const step = Math.round(x0 + (x1 - x0) * at / 1000).toLocaleString("en");
    out.textContent = [`step ${step}`, ...near.map(([label, p]) => `${label} ${show(value(p[1]))}`)].join("  ·  ");
  });
  plot.addEventListener("pointerleave", () => { out.textContent = ""; cursor?.remove(); cursor = undefined; });
}
