// Calls of the server that sent this page. Paths are relative: a proxy may add a prefix.

const KEY = "jaxserve.key"; // sign_in.js has it too

const LOST = "The connection was lost before the answer was complete.";

/** What went wrong, in words. */
class Failure extends Error {}

/** The response, if it is a good one. Throws Failure, or AbortError if `signal` says so. */
async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw connectionFailure(error, "The server cannot be reached.");
  }
  if (!response.ok) throw new Failure(await explain(response));
  return response;
}

/** Its whole text. Throws as `call` does. */
async function callForText(path, options) {
  const response = await call(path, options);
  return response.text().catch((error) => {
    throw connectionFailure(error, LOST);
  });
}

/** The events of a stream, until [DONE]. Throws as `call` does. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw connectionFailure(error, LOST);
    });
    if (done) throw new Failure(LOST);
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(sentence(event.error.message));
      yield event;
    }
  }
}

function connectionFailure(error, message) {
  if (error.name === "AbortError") return error;
  if (error.name === "TimeoutError") return new Failure("The server does not answer.");
  return new Failure(message);
}

async function explain(response) {
  if (response.status === 401) {
    return "The API key is missing or not accepted any more. Reload the page to sign in.";
  }
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the server answered with status ${response.status}`;
  const wait = response.headers.get("Retry-After");
  return sentence(message) + (wait ? ` Try again in ${wait} s.` : "");
}

function sentence(text) {
  const end = /[.!?]$/.test(text) ? "" : ".";
  return text.charAt(0).toUpperCase() + text.slice(1) + end;
}
