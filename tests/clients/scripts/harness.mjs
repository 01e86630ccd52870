// What the scripts for one npm package each have in common: see harness.py.

import { readFileSync } from "node:fs";

export const URL = process.argv[2];
export const MODEL = "smollm2-135m";
export const QUESTION = "What is the capital of France?";

export function assert(condition, what) {
  if (!condition) throw new Error(typeof what === "string" ? what : JSON.stringify(what));
}

export function assertPerson(value) {
  assert(typeof value.name === "string" && value.age >= 0 && value.age <= 150, value);
}

export function assertWeather(value) {
  assert(typeof value.city === "string", value);
  assert(["celsius", "fahrenheit"].includes(value.unit), value);
}

export async function run(client, checks) {
  const outcomes = {};
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
      outcomes[name] = "passed";
    } catch (error) {
      console.error(error);
      outcomes[name] = `${error.name}: ${error.message}`;
    }
  }
  const folder = new globalThis.URL(`../node_modules/${client}/package.json`, import.meta.url);
  const { version } = JSON.parse(readFileSync(folder));
  console.log(JSON.stringify({ client, version, checks: outcomes, figures: {} }));
  process.exit(Object.values(outcomes).every((outcome) => outcome === "passed") ? 0 : 1);
}
