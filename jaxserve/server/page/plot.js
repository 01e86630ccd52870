// A line plot of the last minutes. Colours are the style sheet's: a change of theme draws nothing.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 80;

/** The least of 1, 2 and 5 times a power of ten that is not below `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value * 0.9999);
}

function ageText(seconds) {
  const rounded = Math.round(seconds);
  if (rounded === 0) return "now";
  const minutes = Math.floor(rounded / 60);
  const parts = [minutes && `${minutes} min`, rounded % 60 && `${rounded % 60} s`, "ago"];
  return parts.filter(Boolean).join(" ");
}

/** A card at the end of `parent`. `series`: one or two of {name, label, format}, with the names of
 *  points; without a label, the name is shown. `least`: what the scale reaches at least. */
class Plot {
  constructor(parent, { title, series, least }) {
    this.series = series.map((each) => ({ label: each.name, ...each }));
    this.least = least;
    this.points = [];
    this.lookedAtS = null; // the moment that is looked at; null: the newest
    const card = document.querySelector("#plot").content.firstElementChild.cloneNode(true);
    const find = (selector) => card.querySelector(selector);
    find("h3").textContent = title;
    this.values = this.series.map(({ label }, index) => {
      const item = document.createElement("li");
      item.className = `series-${index}`;
      item.append(`${label} `, document.createElement("b"));
      find("ul").append(item);
      return item.lastChild;
    });
    this.canvas = find(".canvas");
    this.canvas.setAttribute("aria-label", `${title}, last ${WINDOW_S / 60} minutes`);
    this.canvas.setAttribute("aria-valuemin", -WINDOW_S);
    find(".oldest").textContent = ageText(WINDOW_S);
    this.top = find(".top");
    this.age = find(".age");
    this.note = find(".note");
    const svg = find("svg");
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    const path = (name) => {
      const element = svg.appendChild(document.createElementNS(SVG, "path"));
      element.setAttribute("class", name);
      return element;
    };
    this.area = path("area series-0");
    this.lines = series.map((_, index) => path(`line series-${index}`));
    this.mark = path("mark");
    this.#listen();
    parent.append(card);
    this.show([]);
  }

  show(points, note = "") {
    this.points = points;
    this.note.textContent = note;
    this.#draw();
  }

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const ageS = (1 - (event.clientX - box.left) / box.width) * WINDOW_S;
      this.#look(this.#nearest((this.points.at(-1)?.timeS ?? 0) - ageS));
    });
    canvas.addEventListener("pointerleave", () => this.#look(-1));
    canvas.addEventListener("blur", () => this.#look(-1));
    canvas.addEventListener("keydown", (event) => {
      const last = this.points.length - 1;
      const from = this.lookedAtS === null ? last : this.#nearest(this.lookedAtS);
      const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.#look(Math.min(Math.max(to, 0), last));
    });
  }

  #nearest(timeS) {
    const distances = this.points.map((point) => Math.abs(point.timeS - timeS));
    return distances.indexOf(Math.min(...distances));
  }

  #look(index) {
    this.lookedAtS = this.points[index]?.timeS ?? null;
    this.#draw();
  }

  #draw() {
    const { points, series } = this;
    const newestS = points.at(-1)?.timeS ?? 0;
    const values = points.flatMap((point) => series.map(({ name }) => point[name] ?? 0));
    const top = roundUp(Math.max(this.least, ...values));
    const x = (point) => (WIDTH * (1 - (newestS - point.timeS) / WINDOW_S)).toFixed(2);
    const y = (value) => (HEIGHT * (1 - value / top)).toFixed(2);
    series.forEach(({ name }, index) => {
      const runs = runsOf(points, name);
      const outline = (run) => run.map((point) => `${x(point)} ${y(point[name])}`).join("L");
      // h0: a point alone is a dot.
      this.lines[index].setAttribute("d", runs.map((run) => `M${outline(run)}h0`).join(""));
      if (index > 0) return;
      const area = (run) => `M${x(run[0])} ${HEIGHT}L${outline(run)}L${x(run.at(-1))} ${HEIGHT}Z`;
      this.area.setAttribute("d", runs.map(area).join(""));
    });
    this.top.textContent = series[0].format(top);
    this.#tell(newestS, x);
  }

  /** The figures of the moment that is looked at. */
  #tell(newestS, x) {
    const isNewest = this.lookedAtS === null;
    const point = this.points[this.#nearest(isNewest ? newestS : this.lookedAtS)] ?? {};
    const texts = this.series.map(({ name, format }) =>
      point[name] == null ? "–" : format(point[name]),
    );
    texts.forEach((text, index) => (this.values[index].textContent = text));
    const ageS = isNewest ? 0 : newestS - point.timeS;
    this.age.textContent = isNewest ? "now" : ageText(ageS);
    this.mark.setAttribute("d", isNewest ? "" : `M${x(point)} 0V${HEIGHT}`);
    const all = this.series.map(({ label }, index) => `${label} ${texts[index]}`).join(", ");
    this.canvas.setAttribute("aria-valuenow", -Math.round(ageS));
    this.canvas.setAttribute("aria-valuetext", `${ageText(ageS)}: ${all}`);
  }
}

/** The stretches of points in which `name` is known. */
function runsOf(points, name) {
  const runs = [];
  let run = null;
  for (const point of points) {
    if (point[name] == null) {
      run = null;
    } else if (run) {
      run.push(point);
    } else {
      runs.push((run = [point]));
    }
  }
  return runs;
}
