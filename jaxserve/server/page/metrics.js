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

/** One moment of the server: gauges as they are, counters since its start. */
function readingOf(text, timeS) {
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
  const usage = of("kv_cache_usage_perc");
  const numBlocks = of("cache_config_info").reduce(
    (total, { labels }) => total + Number(labels.num_gpu_blocks),
    0,
  );
  return {
    timeS,
    running: sum("num_requests_running"),
    waiting: sum("num_requests_waiting"),
    numBlocks,
    blocks: Math.round((sum("kv_cache_usage_perc") / usage.length) * numBlocks),
    generated: sum("generation_tokens_total"),
    queries: sum("prefix_cache_queries_total"),
    hits: sum("prefix_cache_hits_total"),
    decode: steps("decode"),
    prefill: steps("prefill", "mixed"),
  };
}

/** What the plots show of `now`, given the reading before it. null: nothing is known. */
function pointOf(before, now) {
  const { timeS, running, waiting, blocks } = now;
  const point = { timeS, running, waiting, blocks };
  // A counter that falls belongs to a server that has started again.
  const hasBefore = before && before.generated <= now.generated;
  const rate = (name) =>
    hasBefore ? Math.max(0, now[name] - before[name]) / (timeS - before.timeS) : null;
  for (const name of ["generated", "hits"]) point[name] = rate(name);
  for (const kind of ["decode", "prefill"]) {
    const count = hasBefore ? now[kind].count - before[kind].count : 0;
    point[kind] = count > 0 ? ((now[kind].seconds - before[kind].seconds) / count) * 1000 : null;
  }
  return point;
}

/** The last minutes. A reading that failed leaves a gap. */
class History {
  points = [];
  readings = [];

  add(reading) {
    this.points.push(pointOf(this.readings.at(-1), reading));
    this.readings.push(reading);
    const oldest = reading.timeS - WINDOW_S;
    while (this.readings[0].timeS < oldest) this.readings.shift();
    while (this.points[0].timeS < oldest) this.points.shift();
  }

  addGap(timeS) {
    this.points.push({ timeS });
  }

  /** Of the prompt tokens looked up in these minutes, how many were cached: 0 to 1, or null. */
  hitRate() {
    const [first, last] = [this.readings[0], this.readings.at(-1)];
    const queries = last ? last.queries - first.queries : 0;
    return queries > 0 ? (last.hits - first.hits) / queries : null;
  }
}
