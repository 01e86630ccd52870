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
    { name: "running", label: "running", format: count },
    { name: "waiting", label: "waiting", format: count },
  );
  const tokens = plot("Tokens per second", 10, {
    name: "generated",
    label: "generated",
    format: figure,
  });
  const steps = plot(
    "Step time",
    1,
    { name: "decode", label: "decode", format: milliseconds },
    { name: "prefill", label: "prefill", format: milliseconds },
  );
  const blocks = plot("KV blocks", 10, { name: "blocks", label: "in use", format: count });
  const prefix = plot("Prefix hits", 10, { name: "hits", label: "tokens/s", format: figure });

  function draw() {
    for (const each of [requests, tokens, steps]) each.show(history.points);
    const { blocks: used, numBlocks } = history.readings.at(-1) ?? {};
    const share = numBlocks ? `of ${count(numBlocks)} (${percent.format(used / numBlocks)})` : "";
    blocks.show(history.points, share);
    const rate = history.hitRate();
    prefix.show(history.points, rate === null ? "" : `${percent.format(rate)} of prompts`);
  }

  async function poll() {
    const timeS = performance.now() / 1000;
    try {
      const response = await call("metrics", { signal: AbortSignal.timeout(ANSWER_MS) });
      history.add(readingOf(await response.text(), timeS));
      if (!isUp) await onUp();
      isUp = true;
      onState(isUp, "Ready");
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      isUp = false;
      history.addGap(timeS);
      onState(isUp, error.message);
    }
    draw();
  }

  async function run() {
    for (;;) {
      if (!document.hidden) await poll();
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  run();
}
