// OpenAI's own client for Node.

import OpenAI from "openai";
import { zodResponseFormat, zodFunction } from "openai/helpers/zod";
import { z } from "zod";
import { assert, assertPerson, assertWeather, MODEL, QUESTION, run, URL } from "./harness.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const chat = {
  model: MODEL,
  messages: [{ role: "user", content: QUESTION }],
  temperature: 0,
  max_tokens: 32,
};
const Person = z.object({ name: z.string().max(30), age: z.number().int().min(0).max(150) });
const Weather = z.object({
  city: z.string().max(40),
  unit: z.enum(["celsius", "fahrenheit"]),
});
const tools = [zodFunction({ name: "get_weather", parameters: Weather })];

await run("openai", {
  async models() {
    const { data } = await client.models.list();
    assert(data.length === 1 && data[0].id === MODEL, data);
  },

  async chat() {
    const answer = await client.chat.completions.create(chat);
    assert(answer.choices[0].message.content.includes("Paris"), answer);
    assert(answer.choices[0].finish_reason === "stop", answer);
  },

  async chat_stream() {
    const whole = await client.chat.completions.create(chat);
    const stream = client.chat.completions.stream({
      ...chat,
      stream_options: { include_usage: true },
    });
    const final = await stream.finalChatCompletion();
    assert(final.choices[0].message.content === whole.choices[0].message.content, final);
    assert(final.usage.completion_tokens === whole.usage.completion_tokens, final);
  },

  async completion() {
    const body = { model: MODEL, prompt: "The capital of France is", temperature: 0, max_tokens: 8 };
    const whole = await client.completions.create(body);
    let text = "";
    for await (const chunk of await client.completions.create({ ...body, stream: true })) {
      text += chunk.choices[0].text;
    }
    assert(text.startsWith(" Paris") && text === whole.choices[0].text, text);
  },

  async errors() {
    try {
      await client.chat.completions.create({ ...chat, temperature: -1 });
    } catch (error) {
      assert(error instanceof OpenAI.BadRequestError && error.param === "temperature", error);
      return;
    }
    throw new Error("temperature -1 was taken");
  },

  async a_stream_that_is_aborted() {
    const stream = await client.chat.completions.create({ ...chat, max_tokens: 500, stream: true });
    for await (const _ of stream) break;
    const answer = await client.chat.completions.create(chat);
    assert(answer.choices.length === 1, answer);
  },

  async json_schema() {
    const answer = await client.chat.completions.parse({
      ...chat,
      messages: [{ role: "user", content: "John Doe is 30 years old." }],
      max_tokens: 200,
      response_format: zodResponseFormat(Person, "person"),
    });
    assertPerson(answer.choices[0].message.parsed);
  },

  async required_tool() {
    const answer = await client.chat.completions.parse({
      ...chat,
      max_tokens: 200,
      tools,
      tool_choice: "required",
    });
    assertWeather(answer.choices[0].message.tool_calls[0].function.parsed_arguments);
  },

  async named_tool_streamed() {
    const stream = client.chat.completions.stream({
      ...chat,
      max_tokens: 200,
      tools,
      tool_choice: { type: "function", function: { name: "get_weather" } },
    });
    const message = await stream.finalMessage();
    assert(message.tool_calls[0].function.name === "get_weather", message);
    assertWeather(JSON.parse(message.tool_calls[0].function.arguments));
  },
});
