"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const escaped = text => text.replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
const shown = text => text.replace(/\n/g, "↵").replace(/\t/g, "→").replace(/[\x00-\x1f\x7f]/g, "�");
const minus = text => text.replace("-", "−");
const number = x => x === null ? "−∞" : minus(x.toFixed(2));
const signed = x => (x > 0 ? "+" : "") + number(x);
const percent = x => x >= .9995 ? "100%" : x >= .1 ? (100 * x).toFixed(0) + "%" : x >= .001 ? (100 * x).toFixed(1) + "%"
  : x > 0 ? "<0.1%" : "0%";
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// ---- the candidates, and which of them the last particles descend from

const nodes = data.steps.map((step, t) => step.candidates.map((c, i) => {
  const [parent, added, keep, logWeight, share, copies, logWeightAfter, shareAfter, flags, death, twist, attribution, values] = c;
  const stops = data.wasCut && t + 1 === data.steps.length && copies > 0 && !(flags & 1);
  return {t, i, parent, added, keep, logWeight, share, copies, logWeightAfter, shareAfter, finished: !!(flags & 1),
    carried: !!(flags & 2), cut: !!(flags & 4) || stops, death, twist, attribution, values, kids: [], survives: false};
}));
nodes.forEach((column, t) => {
  for (const node of column) {
    node.parent = t && nodes[t - 1][node.parent];
    if (node.parent) node.parent.kids.push(node);
    const before = node.parent ? node.parent.text : "";
    node.text = before.slice(0, node.keep) + node.added;
  }
});
const lineage = node => { const line = []; for (; node; node = node.parent) line.push(node); return line; };
for (const last of nodes[nodes.length - 1])
  for (let node = last.copies && last; node && !node.survives; node = node.parent) node.survives = true;

// ---- where they are drawn: columns[t] holds those of step t that are, from above to below

const MAX_LABEL = nodes.length > 12 ? 26 : 44, ROOMY = 40, START = 112, LINK = 36, MAX_REJECTED = 3;
let columns, ends, height, rootLine, roomy, row, fontSize, scale = 1;
const pen = document.createElement("canvas").getContext("2d"), mono = getComputedStyle(document.body).getPropertyValue("--mono");
const small = () => row < 16;
const right = t => t < 0 ? START : ends[t];
const left = t => right(t - 1);
const hasText = node => node.copies ? !node.carried : roomy && !node.minor;
const label = node => node.label;

// Labels of a column begin where its long texts begin to differ, and contain the place where each differs from all.
function labelColumn(column) {
  const of = new Map(column.map(node => [shown(node.added), ""]));
  const long = [...of.keys()].filter(text => [...text].length > MAX_LABEL).sort();
  const common = (a, b) => { let n = 0; while (n < a.length && a[n] === b[n]) n++; return n; };
  const first = long.length > 1 ? common(long[0], long[long.length - 1]) : 0;
  const start = first < 4 ? 0 : long[0].lastIndexOf(" ", first - 1) + 1 || first;
  long.forEach((text, i) => {
    const own = Math.max(...[long[i - 1], long[i + 1]].map(other => other === undefined ? 0 : common(text, other)));
    const rest = [...text.slice(start)], place = [...text.slice(start, own)].length, lead = start ? "…" : "";
    const whole = place < MAX_LABEL - 6 ? rest : [...rest.slice(0, 8), "…", ...rest.slice(place - 3)];
    const most = MAX_LABEL - lead.length;
    of.set(text, lead + (whole.length > most ? whole.slice(0, most - 1).join("") + "…" : whole.join("")));
  });
  for (const node of column) node.label = of.get(shown(node.added)) || shown(node.added);
}
for (const column of nodes) for (const died of [true, false]) labelColumn(column.filter(node => node.death >= 0 === died));

// A rejected candidate is minor if it spells the text of a kept sibling in other tokens, or if others are shown.
// A column is forced if every particle has one extension that is kept, and all others are minor for the first reason.
const alike = (a, b) => a.added.startsWith(b.added) || b.added.startsWith(a.added);
nodes.forEach((column, t) => {
  let forced = t > 0;
  for (const siblings of t ? nodes[t - 1].map(node => node.kids) : [column]) {
    const kept = siblings.filter(node => node.copies);
    const rejected = siblings.filter(node => !node.copies).sort((a, b) => b.share - a.share || a.i - b.i);
    for (const node of rejected) node.same = node.death < 0 && kept.some(other => other.added && alike(node, other));
    rejected.filter(node => !node.same).forEach((node, i) => { node.minor = i >= MAX_REJECTED; });
    for (const node of rejected) node.minor ||= node.same;
    if (siblings.length) forced &&= kept.length === 1 && kept[0].copies === 1 && rejected.every(node => node.same);
  }
  if (t && nodes[t - 1].some(node => node.copies && !node.kids.length)) forced = false;
  column.forced = forced && column.some(node => node.copies && !node.carried);
});
const isFolded = t => !!nodes[t]?.forced && $("folded").checked;
const link = t => isFolded(t) ? 3 : LINK;
const thickness = node => Math.max(1, (small() ? 4 : 6) * Math.sqrt(node.shareAfter));

function place() {
  const alone = $("survivors").checked && nodes[nodes.length - 1].some(node => node.survives);
  columns = nodes.map((column, t) => column.filter(node => (!alone || node.survives) && (node.copies || !isFolded(t))));
  const most = of => Math.max(...columns.map(of));
  roomy = most(column => column.length) <= ROOMY;
  row = roomy ? 24 : most(column => column.filter(node => node.copies).length) <= ROOMY ? 18 : 13;
  fontSize = small() ? 10 : 12;
  pen.font = `${fontSize}px ${mono}`;
  ends = [];
  columns.forEach((column, t) => {
    const rank = node => node.parent ? node.parent.rank : 0;
    column.sort((a, b) => rank(a) - rank(b) || !a.copies - !b.copies || a.i - b.i);
    let y = 10, widest = 3 * fontSize * .6;
    column.forEach((node, place) => {
      node.rank = place;
      node.height = node.carried ? Math.min(row, 9) : node.copies ? row : roomy && !node.minor ? 15 : small() ? 3 : 5;
      node.line = y + (node.copies && !node.carried ? node.height - 4 : node.height / 2);
      if (isFolded(t) && node.parent) node.line = node.parent.line;
      y = isFolded(t) ? node.line + 8 : y + node.height;
      if (hasText(node)) widest = Math.max(widest, pen.measureText(label(node)).width);
    });
    column.bottom = y;
    ends.push(right(t - 1) + link(t) + widest + (isFolded(t + 1) ? 1 : 9));
  });
  height = most(column => column.bottom) + 30;
  rootLine = Math.min(columns[0].bottom / 2, 150);
}

// ---- drawing

const attribute = () => data.attributes.indexOf($("colour").value);
const valuesOf = () => [...new Set(nodes.flat().filter(node => node.copies).map(node => node.values[attribute()]))].sort();
const WEIGHTS = [["below 3%", 0], ["3 to 10%", .03], ["10 to 30%", .1], ["above 30%", .3]];     // of the step's weight
const byWeight = () => $("colour").value === "particle weight";       // no attribute has a blank
const level = node => WEIGHTS.filter(([, least]) => node.shareAfter >= least).length - 1;
const colour = node => byWeight() ? "w" + level(node) : attribute() < 0 ? "" : "c" + valuesOfNow.indexOf(node.values[attribute()]);
let valuesOfNow = [];

const spaced = (text, tag = "tspan") => {             // spaces at the beginning are made visible
  const [space] = text.match(/^ */);
  return (space && `<${tag} class="space">${"·".repeat(space.length)}</${tag}>`) + escaped(text.slice(space.length));
};
const end = node => node.copies ? right(node.t) : left(node.t) + link(node.t);
const branch = node => {                               // from the parent's end to its own
  const x = left(node.t), y = node.parent ? node.parent.line : rootLine, to = x + link(node.t), bend = link(node.t) * .55;
  return `M${x} ${y}C${x + bend} ${y} ${to - bend} ${node.line} ${to} ${node.line}H${end(node).toFixed(1)}`;
};
const lift = node => node.copies ? thickness(node) / 2 + (small() ? 1.5 : 3.5) : -3.5;       // of its text above its line
const writing = (node, extra = "") => {
  const size = node.copies ? fontSize : 10.5;
  const kind = node.copies ? extra : "rejected " + extra, x = left(node.t) + link(node.t) + (node.copies ? 0 : 10);
  return `<text class="${kind}" x="${x}" y="${(node.line - lift(node)).toFixed(1)}" font-size="${size}">${spaced(label(node))}</text>`;
};
const cross = (x, y, r) => `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`;
const circle = (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;

function draw() {
  const lines = {}, texts = [], marks = {culled: "", dead: "", finished: "", cut: "", cloned: ""};
  valuesOfNow = attribute() < 0 ? [] : valuesOf();
  const legend = byWeight() ? WEIGHTS.map(([name], k) => ["w" + k, name]) : valuesOfNow.map((value, k) => ["c" + k, value]);
  $("values").innerHTML = legend.map(([kind, name]) => `<li><svg><path class="${kind}" d="M0 6H26"/></svg>${escaped(name) || "–"}</li>`).join("");
  const r = roomy ? 2.6 : small() ? 1.2 : 1.9;
  for (const node of columns.flat()) {
    const kind = node.carried ? "carried" : node.copies ? "kept" : node.death >= 0 ? "dying" : "culled";
    const key = kind === "kept" ? `kept ${colour(node)}" stroke-width="${(Math.round(thickness(node) * 4) / 4)}` : kind;
    const fan = !node.parent && !node.copies && !roomy;        // hundreds of lines from one point say nothing
    if (!fan) lines[key] = (lines[key] || "") + branch(node);
    if (hasText(node) && node.added) texts.push(writing(node));
    const x = +end(node).toFixed(1);
    if (node.death >= 0) marks.dead += cross(x + r, node.line, r * 1.25);
    else if (!node.copies) marks.culled += circle(x + r, node.line, r);
    else if (node.cut && !node.carried) marks.cut += `M${x} ${node.line - 6}v12`;
    else if (node.finished && !node.carried) {
      const side = small() ? 6 : 9;
      marks.finished += `M${x - side} ${node.line - side / 2}h${side}v${side}h${-side}z`;
    } else if (node.copies > 1 || node.kids.filter(kid => kid.copies).length > 1)
      marks.cloned += circle(x, node.line, Math.max(small() ? 1.6 : 2.6, thickness(node) / 2 + .8));
  }
  const paths = Object.entries(lines).map(([key, d]) => `<path class="${key}" d="${d}"/>`);
  const drawn = Object.entries(marks).map(([key, d]) => `<path class="mark-${key}" d="${d}"/>`);
  const prompt = data.prompts.length === 1 ? [...shown(data.messages[0] || data.prompts[0])] : [];
  const start = prompt.length > 12 ? "…" + prompt.slice(-11).join("") : prompt.join("") || "start";
  $("all").innerHTML = paths.join("") + drawn.join("") + texts.join("")
    + `<text x="8" y="${rootLine - 6}" font-size="11" class="rejected">${escaped(start)}</text>`;
  const tree = $("tree"), width = right(nodes.length - 1) + 60;
  tree.setAttribute("viewBox", `0 0 ${width} ${height}`);
  tree.setAttribute("width", width * scale);
  tree.setAttribute("height", height * scale);
  tree.classList.toggle("far", scale * fontSize < 5);  // nobody could read the texts
  drawCurves(width * scale);
  mark();
  show(chosen());
}

function drawCurves(width) {                           // above the columns, and the axis of the steps below them
  const HEIGHT = 40, EDGE = 6;
  const xs = nodes.map((_, t) => (left(t) + link(t) + right(t)) / 2 * scale);
  const strip = (name, id, marks, inside) => `<div class="row"><div class="label"><b>${name}</b><span id="${id}"></span>${marks}</div>`
    + `<svg role="img" aria-label="${name} over the steps" width="${width}" height="${HEIGHT}">${inside}</svg></div>`;
  const curve = (id, name, values, low) => {
    const finite = values.filter(value => value !== null), high = Math.max(low ?? -Infinity, ...finite, -1e300);
    const bottom = low ?? Math.min(...finite, high), flat = high - bottom < 1e-6, range = flat ? 1 : high - bottom;
    const y = value => HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (value - bottom) / range;
    const d = values.map((value, t) => value === null ? "" : `${t && values[t - 1] !== null ? "L" : "M"}${xs[t].toFixed(1)} ${y(value).toFixed(1)}`);
    const last = values.findLastIndex(value => value !== null);
    const dot = last < 0 ? "" : `<circle cx="${xs[last].toFixed(1)}" cy="${y(values[last]).toFixed(1)}" r="2.5"/>`;
    const ten = 10 ** Math.floor(Math.log10(range)), step = [.2, .5, 1, 2, 5].map(k => k * ten).find(each => range / each < 3);
    const marks = flat && finite.length ? [bottom] : [];                                  // the axis: round numbers, two or three
    for (let k = Math.ceil(bottom / step); finite.length && !flat && k * step <= high; k++) marks.push(k * step);
    const digits = flat ? 1 : Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const grid = marks.map(value => `<line x1="0" x2="${width}" y1="${y(value).toFixed(1)}" y2="${y(value).toFixed(1)}"/>`);
    const named = marks.map(value => `<i style="top: ${(y(value) - 7).toFixed(1)}px">${minus((value || 0).toFixed(digits))}</i>`);
    return strip(name, id, named.join(""), `${grid.join("")}<path d="${d.join("")}"/>${dot}`);
  };
  const shares = () => {                               // of the values of an attribute, by the weights of the particles
    const all = nodes.flatMap((column, t) => {
      let y = 4;
      return attribute() < 0 ? [] : valuesOf().map((value, k) => {
        const share = column.filter(node => node.values[attribute()] === value).reduce((sum, node) => sum + node.shareAfter, 0);
        const from = left(t) * scale, height = share * (HEIGHT - 8);
        y += height;
        return `<rect class="c${k}" x="${(from + 1).toFixed(1)}" y="${(y - height).toFixed(1)}" width="${Math.max(right(t) * scale - from - 2, 1).toFixed(1)}" height="${height.toFixed(1)}"/>`;
      });
    });
    return all.length ? strip(escaped(data.attributes[attribute()]), "value", '<i style="top: -3px">1</i><i style="top: 27px">0</i>', all.join("")) : "";
  };
  let before = -Infinity;
  const ticks = xs.map((x, t) => x - before < 22 ? "" : (before = x, `<text x="${x.toFixed(1)}" y="13">${t + 1}</text>`));
  $("curves").innerHTML = curve("ess", "ESS", data.steps.map(step => step.ess), 0)
    + curve("log-ml", "log Ẑ", data.steps.map(step => step.logMl))
    + curve("ancestors", "ancestors", nodes.map(column => column.filter(node => node.survives).length), 0) + shares()
    + `<div class="row axis"><div class="label"><b id="at">step</b></div><svg width="${width}" height="18">${ticks.join("")}</svg></div>`;
}

// ---- finding: the candidates with which a text has come

let hits = [];
function mark() {
  const wanted = $("find").value.toLowerCase();
  const holds = node => node && node.text.toLowerCase().includes(wanted);
  hits = wanted ? columns.flat().filter(node => holds(node) && !holds(node.parent)) : [];
  $("found").textContent = wanted ? `${hits.length} found` : "";
  $("hits").innerHTML = hits.map(node => {
    const x = left(node.t) + link(node.t) - 2, text = hasText(node) ? pen.measureText(label(node)).width : 0;
    const top = node.copies ? node.line - lift(node) - fontSize : node.line - 7;
    return `<rect x="${x}" y="${top}" width="${text + (node.copies ? 5 : 13)}" height="${node.copies ? fontSize + 3 : 14}" rx="2"/>`;
  }).join("");
}
function next(step) {
  const at = hits.indexOf(chosen()), to = at < 0 ? (step > 0 ? 0 : hits.length - 1) : (at + step + hits.length) % hits.length;
  if (hits.length) choose(hits[to]);
}

// ---- the header, and the panel while no particle is chosen

const MAX_LINKS = 8;                                   // to steps, for each cause of deaths
const bar = share => `<td><svg class="bar" aria-hidden="true" width="56" height="8"><rect width="${Math.max(56 * share, 1).toFixed(1)}" height="8" rx="2" fill="currentColor" opacity=".7"/></svg></td>`;
const section = (title, rows, note = "") => rows.length ? `<h2>${title}</h2>${note}<table>${rows.map(row => `<tr>${row}</tr>`).join("")}</table>` : "";

function overview() {
  const last = nodes[nodes.length - 1], dead = nodes.flat().filter(node => node.death >= 0);
  const sum = of => data.particles.reduce((total, [place, weight]) => total + of(last[place], weight), 0);
  const figures = {steps: nodes.length, particles: sum(node => node.copies), finished: sum(node => node.finished * node.copies),
    deaths: dead.length, "log Ẑ": number(data.steps[nodes.length - 1].logMl),
    ESS: data.particles.length ? (1 / sum((_, weight) => weight ** 2)).toFixed(1) : "0"};
  $("title").textContent = data.title;
  $("status").textContent = data.status;
  $("summary").innerHTML = Object.entries(figures).map(([name, value]) => `<div><dt>${name}</dt><dd>${value}</dd></div>`).join("");
  const quotes = of => of.map(text => `<q>${escaped(text)}</q>`).join(" and ");
  const talks = data.messages.some(text => text);
  $("prompt").innerHTML = data.prompts.length ? `after ${quotes(data.prompts.map((text, i) => data.messages[i] || text))}` : "";
  if (talks) $("prompt").innerHTML += `<details><summary>whole conversation</summary>${quotes(data.prompts)}</details>`;
  const largest = Math.max(...data.weighed.map(([, mean]) => Math.abs(mean)), 1e-9);
  const weighed = data.weighed.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).map(([name, mean]) =>
    `${bar(Math.abs(mean) / largest)}<td class="n">${number(mean)}</td><td class="code">${escaped(name)}</td>`);
  const causes = data.deaths.map((name, k) => [name, dead.filter(node => node.death === k)]).sort((a, b) => b[1].length - a[1].length);
  const killed = causes.map(([name, nodes]) => {
    const steps = new Map();
    for (const node of nodes) steps.set(node.t, [...steps.get(node.t) || [], node]);
    const links = [...steps.values()].slice(0, MAX_LINKS).map(of => `<a href="${address(of[0])}">${of[0].t + 1}</a>${of.length > 1 ? ` (×${of.length})` : ""}`);
    const more = steps.size > MAX_LINKS ? ", …" : "";
    return `<td class="n dead">× ${nodes.length}</td><td class="code">${escaped(name)}<div>step ${links.join(", ")}${more}</div></td>`;
  });
  const alive = data.particles.map(([place, weight]) => {
    const node = last[place], state = (node.copies > 1 ? ` ×${node.copies}` : "") + (node.cut ? " [cut]" : node.finished ? " ■" : " …");
    return `${bar(weight / data.particles[0][1])}<td class="n">${weight.toFixed(3)}</td>`
      + `<td class="text"><a href="${address(node)}">${escaped(shown(node.text))}</a><span class="state">${state}</span></td>`;
  });
  $("tables").innerHTML = section("What weighed them", weighed, "<p>What each statement added to the log weight, the mean over the particles by weight.</p>")
    + section("What killed others", killed) + section(`Particles after step ${nodes.length}`, alive);
  $("colour").innerHTML = ["particle weight", ...data.attributes, "none"].map(name => `<option>${escaped(name)}</option>`).join("");
}

// ---- one particle: its ancestors, its descendants, and its history

const below = node => node.kids.flatMap(kid => kid.copies ? [kid, ...below(kid)] : []);
const visible = node => columns[node.t][node.rank] === node;

function fate(node) {
  const column = nodes[node.t], alive = column.filter(other => other.copies);
  const kept = alive.reduce((sum, other) => sum + other.copies, 0);
  const share = `It had ${percent(node.share)} of the weight of ${plural(column.length, "candidate")}`;
  if (node.death >= 0) return ["died", "Died", `: <code>${escaped(data.deaths[node.death])}</code>`];
  if (!node.copies) return ["dropped", "Culled", `. ${share}, of which ${kept} were kept.`];
  const copies = node.copies > 1 ? `, ${node.copies} times` : "";
  if (node.cut) return ["lived", "Cut", `${copies}: the run stopped it before its program had ended. ${share}.`];
  const kids = node.kids.filter(kid => kid.copies).length;
  const after = node.t + 1 === nodes.length ? "" : node.finished ? ""
    : kids ? ` ${plural(kids, "descendant")} of it ${kids === 1 ? "was" : "were"} kept in the next step.`
    : " None of its extensions outlived the next step.";
  if (node.finished) return ["ended", "Finished", `${node.carried ? " before" : ""}, and kept${copies}. ${share}.`];
  return ["lived", "Kept", `${copies}. ${share}.${after}`];
}

function history(node) {
  const part = (name, w, kind = "") => `<tr class="part ${kind}"><td></td><td class="code">${escaped(name)}</td>`
    + `<td class="n">${w}</td><td></td></tr>`;
  const bodies = lineage(node).map(each => {
    const parts = each.attribution.map(([name, w]) => part(data.statements[name], signed(w)));
    if (each.twist) parts.push(part("twist, taken back later", signed(each.twist)));
    if (each.death >= 0) parts.push(part(data.deaths[each.death], "−∞", "dead"));
    return `<tbody><tr><td class="n"><a href="${address(each)}">${each.t + 1}</a></td>`
      + `<td class="text">${spaced(shown(each.added), "span") || (each.carried ? "■" : "–")}</td>`
      + `<td class="n">${number(each.logWeight)}</td><td class="n">${percent(each.share)}</td></tr>${parts.join("")}</tbody>`;
  });
  return `<table id="history"><thead><tr><th class="n">step</th><th>text, and what weighed it</th>`
    + `<th class="n">log weight</th><th class="n">share</th></tr></thead>${bodies.join("")}</table>`;
}

function show(node) {
  $("overview").hidden = !!node;
  $("detail").hidden = !node;
  $("all").classList.toggle("dimmed", !!node);
  $("chosen").innerHTML = "";
  if (!node) return;
  if (!visible(node)) {                                  // a culled one, where only survivors were shown
    $("survivors").checked = $("folded").checked = false;
    place();
    return draw();
  }
  const [kind, name, why] = fate(node), line = lineage(node);
  $("chosen").classList.toggle("over-dead", kind === "died");
  const stroke = each => each.copies ? Math.max(1.5, thickness(each)) : 1.5;
  const drawn = [...below(node).filter(visible).map(each => `<path class="below" stroke-width="${Math.max(1, thickness(each))}" d="${branch(each)}"/>`),
    ...line.map(each => `<path class="${each === node ? "end" : ""}" stroke-width="${stroke(each)}" d="${branch(each)}"/>`)];
  for (const each of line) {
    if (!each.added) continue;
    if (hasText(each)) drawn.push(writing(each, each === node ? "end" : ""));
    else if (each === node) {                          // its text has no place of its own: it covers its neighbours
      const x = left(node.t) + link(node.t) + 12, width = pen.measureText(label(node)).width + 8;
      drawn.push(`<rect x="${x}" y="${node.line - fontSize / 2 - 4}" width="${width}" height="${fontSize + 6}" rx="3"/>`
        + `<text class="end" x="${x + 4}" y="${node.line + fontSize / 3}" font-size="${fontSize}">${spaced(label(node))}</text>`);
    }
  }
  if (kind === "died") drawn.push(`<path class="end" stroke-width="2" d="${cross(end(node) + 3, node.line, 4)}"/>`);
  $("chosen").innerHTML = drawn.join("");
  const before = node.text.slice(0, node.keep), message = data.messages[0] && data.messages[0] + "\n";
  const prompt = data.prompts.length === 1 ? (message || data.prompts[0]).slice(-200) : "";
  const values = data.attributes.map((name, k) => `${escaped(name)}: <b>${escaped(node.values[k])}</b>`).join(", ");
  $("detail").className = kind;
  $("detail").innerHTML = `<div class="bars"><h2>Step ${node.t + 1}, candidate ${node.i}</h2><a href="#">all particles</a></div>`
    + `<div class="fate"><b>${name}</b>${why}</div>`
    + `<div class="whole"><i>${escaped(prompt)}</i>${escaped(before)}<mark>${escaped(node.added) || "∎"}</mark></div>`
    + (values && `<p>${values}</p>`) + `<h2>Its history</h2>${history(node)}`;
  const stage = $("stage"), x = right(node.t) * scale, y = node.line * scale, top = $("curves").offsetHeight;
  if (x > stage.scrollLeft + stage.clientWidth - 30 || left(node.t) * scale < stage.scrollLeft + START)
    stage.scrollLeft = x - stage.clientWidth * .7;
  if (y > stage.scrollTop + stage.clientHeight - top - 40 || y < stage.scrollTop)
    stage.scrollTop = y - (stage.clientHeight - top) / 2;
}

const framed = location.protocol === "about:";         // in a notebook, where the address is not the page's
let inFrame = "";
const address = node => node ? `#step=${node.t + 1}&amp;candidate=${node.i}` : "#";
const at = hash => {
  const wanted = new URLSearchParams(hash.slice(1)), column = nodes[wanted.get("step") - 1];
  return column && column[wanted.get("candidate")];
};
const chosen = () => at(framed ? inFrame : location.hash);
function go(hash) {
  if (framed) inFrame = hash; else location.hash = hash;
  show(chosen());                                      // now, since hashchange comes later
}
const choose = node => go(address(node).replace("&amp;", "&"));

// ---- pointer and keys

function nodeAt(event) {
  const box = $("tree").getBoundingClientRect(), x = (event.clientX - box.left) / scale, y = (event.clientY - box.top) / scale;
  const t = ends.findIndex(edge => x < edge);
  if (t < 0 || x < START || y < 0) return null;
  let best = null, distance = 14;
  for (const node of columns[t]) {
    const middle = node.copies && !node.carried ? node.line - node.height / 2 + 4 : node.line;
    const d = Math.max(Math.abs(y - middle) - node.height / 2, 0);
    if (d < distance) { best = node; distance = d; }
  }
  return best;
}
$("stage").addEventListener("mousemove", event => {
  const node = nodeAt(event), tip = $("tip");
  tip.hidden = !node;
  const step = node && data.steps[node.t];
  $("ess").textContent = step ? step.ess.toFixed(1) : "";
  $("log-ml").textContent = step ? number(step.logMl) : "";
  $("ancestors").textContent = step ? nodes[node.t].filter(each => each.survives).length : "";
  $("at").textContent = step ? `step ${node.t + 1}` : "step";
  if (!node) return;
  const [, name, why] = fate(node), text = shown(node.text);
  tip.innerHTML = `<div>${text.length > 120 ? "…" : ""}${escaped(text.slice(-120))}</div><span><b>${name}</b>${why}</span>`;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
});
$("stage").addEventListener("mouseleave", () => { $("tip").hidden = true; });
$("stage").addEventListener("click", event => { choose(nodeAt(event)); });
document.addEventListener("click", event => {
  const link = event.target.closest("a[href^='#']") || event.target.closest("#history tbody")?.querySelector("a");
  if (!link) return;
  event.preventDefault();                              // in a frame it would lead to the page around it
  go(link.getAttribute("href"));
});
for (const name of ["survivors", "folded", "colour"]) $(name).addEventListener("change", () => {
  const node = chosen();
  if (node && ($("survivors").checked && !node.survives || isFolded(node.t) && !node.copies)) choose(null);
  place();
  draw();
});
$("find").addEventListener("input", mark);
$("find").addEventListener("keydown", event => {
  if (event.key === "Enter") next(event.shiftKey ? -1 : 1);
  if (event.key === "Escape") { $("find").value = ""; mark(); $("stage").focus(); }
});
function zoom(way) {
  const whole = ($("stage").clientWidth - 1) / (right(nodes.length - 1) + 60);
  scale = way ? Math.min(2, Math.max(.1, scale * 1.25 ** way)) : Math.max(.1, Math.min(1, whole));
  draw();
}
$("zoom").addEventListener("click", event => { if (event.target.dataset.zoom) zoom(+event.target.dataset.zoom); });
addEventListener("keydown", event => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.id === "find") return;
  const node = chosen();
  if (event.key === "Escape") return choose(null);
  if (event.key === "/") { event.preventDefault(); return $("find").focus(); }
  if (event.key === "+" || event.key === "-") return zoom(event.key === "+" ? 1 : -1);
  if (!event.key.startsWith("Arrow")) return;
  event.preventDefault();
  const heaviest = of => of.filter(visible).reduce((best, each) => !best || each.shareAfter > best.shareAfter ? each : best, null);
  const to = !node ? heaviest(nodes[0]) : {ArrowLeft: node.parent, ArrowRight: heaviest(node.kids),
    ArrowUp: columns[node.t][node.rank - 1], ArrowDown: columns[node.t][node.rank + 1]}[event.key];
  if (to) choose(to);
});
addEventListener("hashchange", () => show(chosen()));
overview();
place();
draw();
