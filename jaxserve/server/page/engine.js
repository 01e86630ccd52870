// The live view: /metrics once a second, while somebody can see it.

const POLL_MS = 1000;
const ANSWER_MS = 5000;

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const percent = new Intl.NumberFormat("en", { style: "percent", maximumFractionDigits: 1 });
const count = (value) => whole.format(value);
const figure = (value) => (value < 100 ? short.format(value) : whole.format(value));
const milliseconds = (value) => `${figure(value)} ms`;

/** Draws in `parent` and polls for ever. `onUp()` is awaited when the server has come up,
 *  `onState(isUp, text)` called after each poll. */
function watchEngine(parent, onUp, onState) {
  let isUp = false;
  const history = new History();
  const plot = (title, least, ...series) => new Plot(parent, { title, least, series });
  const requests = plot(
    "Requests",
    1,
    { name: "running", format: count },
    { name: "waiting", format: count },
  );
  const tokens = plot("Tokens per second", 10, { name: "generated", format: figure });
  const steps = plot(
    "Step time",
    1,
    { name: "decode", format: milliseconds },
    { name: "prefill", format: milliseconds },
  );
  const blocks = plot("KV blocks", 10, { name: "blocks", label: "in use", format: count });
  const prefix = plot("Prefix hits", 10, { name: "hits", label: "tokens/s", format: figure });

  function draw() {
    for (const each of [requests, tokens, steps]) each.show(history.points);
    const { reading } = history.points.at(-1);
    const share = reading && percent.format(reading.blocks / reading.numBlocks);
    blocks.show(history.points, reading ? `of ${count(reading.numBlocks)} (${share})` : "");
    const rate = history.hitRate();
    prefix.show(history.points, rate === null ? "" : `${percent.format(rate)} of prompts`);
  }

  /** Throws Failure. */
  async function read() {
    const text = await callForText("metrics", { signal: AbortSignal.timeout(ANSWER_MS) });
    if (!isUp) await onUp();
    return readingOf(text);
  }

  async function poll() {
    const timeS = performance.now() / 1000;
    let problem = null;
    const reading = await read().catch((error) => {
      if (!(error instanceof Failure)) throw error;
      problem = error.message;
      return null;
    });
    isUp = reading !== null;
    onState(isUp, problem ?? "Ready");
    history.add(timeS, reading);
    draw();
  }

  async function run() {
    for (;;) {
      if (document.hidden) history.add(performance.now() / 1000, null);
      else await poll();
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  run();
}
