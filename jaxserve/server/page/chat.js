// The conversation: turns of one question and one answer, kept for the life of the tab.

const TURNS = "jaxserve.turns";
const REASONS = { length: "token limit reached", abort: "ended by the server" };

class Chat {
  /** `element`: the chat's section; `chosen()`: {model, system, params} for a request, or null
   *  while they are not in order; `say(text)` speaks to screen readers. */
  constructor(element, chosen, say) {
    const find = (selector) => element.querySelector(selector);
    this.element = element;
    this.chosen = chosen;
    this.say = say;
    this.log = find(".log");
    this.list = find(".turns");
    this.message = find(".composer textarea");
    this.context = find(".context");
    this.turns = JSON.parse(sessionStorage.getItem(TURNS) ?? "[]");
    this.running = null; // aborts the answer that is being written
    this.turns.forEach((turn) => this.#show(turn));
    this.#changed();
    find(".composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.message.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    find(".stop").addEventListener("click", () => this.stop());
    find(".clear").addEventListener("click", () => this.clear());
  }

  /** The server notices, and frees what the answer held. */
  stop() {
    if (!this.running) return;
    this.running.abort();
    this.message.focus();
  }

  clear() {
    this.running?.abort();
    this.running = null;
    this.turns = [];
    this.list.replaceChildren();
    this.#changed();
    this.say("The conversation is cleared.");
    this.message.focus();
  }

  #send() {
    const question = this.message.value.trim();
    if (question && this.#ask(question)) this.message.value = "";
  }

  #retry() {
    const { question } = this.turns.at(-1);
    const view = this.list.lastElementChild;
    if (!this.#ask(question, this.turns.slice(0, -1))) return;
    view.remove();
    this.message.focus();
  }

  /** Whether a request is on its way. */
  #ask(question, before = this.turns) {
    const chosen = this.running ? null : this.chosen();
    if (!chosen) return false;
    const { model, system, params } = chosen;
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of before) {
      // A question without an answer is no part of the conversation.
      if (!turn.answer) continue;
      messages.push({ role: "user", content: turn.question });
      messages.push({ role: "assistant", content: turn.answer });
    }
    messages.push({ role: "user", content: question });
    const turn = { question, reasoning: "", answer: "", calls: [] };
    this.turns = [...before, turn];
    this.running = new AbortController();
    this.say("Answering.");
    this.#answer(turn, this.#show(turn), { model: model?.id, messages, ...params }, model);
    return true;
  }

  async #answer(turn, view, request, model) {
    const running = this.running;
    const clock = new Clock();
    view.item.classList.add("running");
    this.#changed();
    this.log.scrollTop = this.log.scrollHeight;
    try {
      const response = await call("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({
          ...request,
          stream: true,
          stream_options: { include_usage: true, continuous_usage_stats: true },
        }),
        signal: running.signal,
      });
      for await (const { choices, usage } of eventsOf(response)) {
        const [choice] = choices;
        clock.see(usage);
        turn.figures = clock.text();
        turn.reason = REASONS[choice?.finish_reason] ?? turn.reason;
        turn.context = contextText(usage, model);
        this.#append(turn, view, choice?.delta ?? {});
      }
    } catch (error) {
      if (error.name === "AbortError") turn.reason = "stopped";
      else if (error instanceof Failure) turn.problem = error.message;
      else throw error;
    } finally {
      view.item.classList.remove("running");
      this.#fill(turn, view);
      // Not if the conversation was cleared meanwhile.
      if (this.running === running) {
        this.running = null;
        this.#changed();
        this.say(turn.problem ?? [turn.answer, ...turn.calls.map(callText), turn.reason ?? ""].join(" "));
      }
    }
  }

  /** What a chunk of the stream adds to the message. */
  #append(turn, view, { reasoning = "", content, tool_calls = [] }) {
    const { log } = this;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    turn.reasoning += reasoning;
    view.thoughts.append(reasoning);
    turn.answer += content ?? "";
    view.answer.append(content ?? "");
    for (const { index, function: { name, arguments: text } } of tool_calls) {
      turn.calls[index] ??= { name, text: "" };
      turn.calls[index].text += text;
    }
    this.#fill(turn, view);
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  #show(turn) {
    const template = this.element.querySelector("template");
    const item = template.content.firstElementChild.cloneNode(true);
    const find = (selector) => item.querySelector(selector);
    const view = {
      item,
      reasoning: find(".reasoning"),
      thoughts: find(".reasoning div"),
      answer: find(".answer"),
      calls: find(".calls"),
      figures: find(".figures"),
      problem: find(".problem"),
    };
    find(".question").textContent = turn.question;
    view.thoughts.textContent = turn.reasoning;
    view.answer.textContent = turn.answer;
    find(".copy").hidden = !navigator.clipboard; // it needs https or this machine
    find(".copy").addEventListener("click", async () => {
      await navigator.clipboard.writeText(turn.answer);
      this.say("Copied.");
    });
    find(".retry").addEventListener("click", () => this.#retry());
    this.#fill(turn, view);
    this.list.append(item);
    return view;
  }

  #fill(turn, view) {
    view.reasoning.hidden = !turn.reasoning;
    view.calls.replaceChildren(
      ...turn.calls.map((call) => {
        const item = document.createElement("li");
        item.textContent = callText(call);
        return item;
      }),
    );
    view.figures.textContent = [turn.figures, turn.reason].filter(Boolean).join(" · ");
    view.problem.textContent = turn.problem ?? "";
    this.context.textContent = turn.context ?? "";
  }

  /** Turns were begun, ended or dropped. */
  #changed() {
    this.element.classList.toggle("busy", this.running !== null);
    this.element.classList.toggle("empty", this.turns.length === 0);
    this.context.textContent = this.turns.at(-1)?.context ?? "";
    try {
      sessionStorage.setItem(TURNS, JSON.stringify(this.turns));
    } catch {
      sessionStorage.removeItem(TURNS); // too long to be kept
    }
  }
}

/** Times of one answer, as they are seen here. */
class Clock {
  #sentMs = performance.now();
  #first = null;
  #last = null;

  see(usage) {
    const tokens = usage?.completion_tokens ?? 0;
    if (tokens <= (this.#last?.tokens ?? 0)) return;
    this.#last = { tokens, ms: performance.now() };
    this.#first ??= this.#last;
  }

  text() {
    if (!this.#first) return "";
    const tokens = this.#last.tokens - this.#first.tokens;
    const rate = tokens > 0 ? tokens / ((this.#last.ms - this.#first.ms) / 1000) : null;
    return [
      rate === null ? "" : `${figure(rate)} tokens/s`,
      `first token ${((this.#first.ms - this.#sentMs) / 1000).toFixed(2)} s`,
      `${count(this.#last.tokens)} ${this.#last.tokens === 1 ? "token" : "tokens"}`,
    ]
      .filter(Boolean)
      .join(" · ");
  }
}

function callText({ name, text }) {
  return `${name}(${text})`;
}

function contextText(usage, model) {
  if (!usage || !model) return "";
  return `${count(usage.total_tokens)} of ${count(model.max_model_len)} tokens of context`;
}
