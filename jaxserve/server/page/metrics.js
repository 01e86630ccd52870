// /metrics, as Prometheus reads it, and what has changed between two readings.

const WINDOW_S = 180;

/** Families' samples by name: [{labels, value}]. */
function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = /^jaxserve:(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value;
    }
    if (!samples.has(match[1])) samples.set(match[1], []);
    samples.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return samples;
}

/** What the server has said of itself: gauges as they are, counters since its start. */
function readingOf(text) {
  const samples = parseMetrics(text);
  const of = (name) => samples.get(name) ?? [];
  const sum = (name, ...kinds) =>
    of(name)
      .filter(({ labels }) => !kinds.length || kinds.includes(labels.kind))
      .reduce((total, { value }) => total + value, 0);
  const steps = (...kinds) => ({
    seconds: sum("step_time_seconds_sum", ...kinds),
    count: sum("step_time_seconds_count", ...kinds),
  });
  const numBlocks = of("cache_config_info").reduce(
    (total, { labels }) => total + Number(labels.num_gpu_blocks),
    0,
  );
  const usage = sum("kv_cache_usage_perc") / of("kv_cache_usage_perc").length;
  return {
    running: sum("num_requests_running"),
    waiting: sum("num_requests_waiting"),
    numBlocks,
    blocks: Math.round(usage * numBlocks),
    generated: sum("generation_tokens_total"),
    queries: sum("prefix_cache_queries_total"),
    hits: sum("prefix_cache_hits_total"),
    decode: steps("decode"),
    prefill: steps("prefill", "mixed"),
  };
}

/** What the plots show of a reading, `seconds` after the one before it, if there was one. */
function figuresOf(before, now, seconds) {
  const { running, waiting, blocks } = now;
  const figures = { running, waiting, blocks };
  // A counter that falls belongs to a server that has started again.
  if (!before || before.generated > now.generated) return figures;
  for (const name of ["generated", "hits"]) figures[name] = (now[name] - before[name]) / seconds;
  for (const kind of ["decode", "prefill"]) {
    const numSteps = now[kind].count - before[kind].count;
    if (!numSteps) continue;
    figures[kind] = ((now[kind].seconds - before[kind].seconds) / numSteps) * 1000;
  }
  return figures;
}

/** The last minutes, as points of a plot: {timeS, reading, ...figures}. */
class History {
  points = [];

  /** `reading`: null if there is none, which leaves a gap. */
  add(timeS, reading) {
    const before = this.points.at(-1);
    const figures = reading && figuresOf(before?.reading, reading, timeS - before?.timeS);
    this.points.push({ timeS, reading, ...figures });
    while (this.points[0].timeS < timeS - WINDOW_S) this.points.shift();
  }

  /** Of the prompt tokens looked up in these minutes, how many were cached: 0 to 1, or null. */
  hitRate() {
    const readings = this.points.map(({ reading }) => reading).filter(Boolean);
    const [first, last] = [readings[0], readings.at(-1)];
    const queries = last ? last.queries - first.queries : 0;
    return queries > 0 ? (last.hits - first.hits) / queries : null;
  }
}
