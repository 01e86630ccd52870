// The AI SDK with @ai-sdk/openai-compatible.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { assert, assertPerson, assertWeather, MODEL, QUESTION, run, URL } from "./harness.mjs";

const provider = createOpenAICompatible({
  name: "jaxserve",
  baseURL: `${URL}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const options = {
  model: provider(MODEL),
  prompt: QUESTION,
  temperature: 0,
  maxOutputTokens: 32,
  maxRetries: 0,
};
const Person = z.object({ name: z.string().max(30), age: z.number().int().min(0).max(150) });
const tools = {
  get_weather: tool({
    description: "The weather in a city",
    inputSchema: z.object({
      city: z.string().max(40),
      unit: z.enum(["celsius", "fahrenheit"]),
    }),
  }),
};

await run("@ai-sdk/openai-compatible", {
  async text() {
    const { text, finishReason, usage } = await generateText(options);
    assert(text.includes("Paris") && finishReason === "stop", text);
    assert(usage.outputTokens > 3, usage);
  },

  async stream() {
    const whole = await generateText(options);
    const result = streamText(options);
    let text = "";
    for await (const part of result.textStream) text += part;
    assert(text === whole.text, text);
    assert((await result.usage).outputTokens === whole.usage.outputTokens, "usage");
  },

  async completion_model() {
    const { text } = await generateText({
      ...options,
      model: provider.completionModel(MODEL),
      prompt: "Count: 1, 2, 3,",
    });
    assert(text.length > 0, text);
  },

  async object() {
    const { object } = await generateObject({
      ...options,
      schema: Person,
      prompt: "John Doe is 30 years old.",
      maxOutputTokens: 200,
    });
    assertPerson(object);
  },

  async object_stream() {
    const { object, partialObjectStream } = streamObject({
      ...options,
      schema: Person,
      prompt: "John Doe is 30 years old.",
      maxOutputTokens: 200,
    });
    for await (const _ of partialObjectStream);
    assertPerson(await object);
  },

  async required_tool() {
    const { toolCalls } = await generateText({
      ...options,
      tools,
      toolChoice: "required",
      maxOutputTokens: 200,
    });
    assert(toolCalls[0].toolName === "get_weather", toolCalls);
    assertWeather(toolCalls[0].input);
  },

  async named_tool_streamed() {
    const result = streamText({
      ...options,
      tools,
      toolChoice: { type: "tool", toolName: "get_weather" },
      maxOutputTokens: 200,
    });
    await result.consumeStream();
    const [call] = await result.toolCalls;
    assert(call.toolName === "get_weather", call);
    assertWeather(call.input);
  },
});
