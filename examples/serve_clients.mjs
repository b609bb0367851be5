// The openai client for node against a running `lmhead serve`:
//   npm install openai
//   node examples/serve_clients.mjs http://127.0.0.1:8401 smollm2-135m
// It prints one JSON object, and ends with an error where an answer is not as it should be.
import assert from 'node:assert/strict';
import OpenAI from 'openai';

const [url = 'http://127.0.0.1:8401', model = 'smollm2-135m'] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: process.env.LMHEAD_KEY ?? 'none', maxRetries: 0 });
const told = {};

const models = await client.models.list();
assert.ok(models.data.some((one) => one.id === model));

const asked = { model, prompt: 'The capital of France is', max_tokens: 6, temperature: 0, logprobs: 2 };
const plain = await client.completions.create(asked);
told.completion = plain.choices[0].text;
assert.equal(plain.choices[0].logprobs.tokens.length, plain.usage.completion_tokens);
let text = '';
let usage = null;
const parts = await client.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
for await (const part of parts) {
  text += part.choices[0]?.text ?? '';
  usage = part.usage ?? usage;
}
assert.equal(text, told.completion);
assert.deepEqual(usage, plain.usage);

const chat = { model, messages: [{ role: 'user', content: 'Say hello.' }], max_completion_tokens: 8, seed: 1, logprobs: true, top_logprobs: 2 };
const answer = await client.chat.completions.create(chat);
told.chat = answer.choices[0].message.content;
assert.equal(answer.choices[0].logprobs.content[0].top_logprobs.length, 2);
let said = '';
for await (const part of await client.chat.completions.create({ ...chat, stream: true })) {
  said += part.choices[0]?.delta?.content ?? '';
}
assert.equal(said, told.chat);

const schema = { type: 'object', properties: { city: { enum: ['Paris', 'Rome'] } }, required: ['city'], additionalProperties: false };
const form = { type: 'json_schema', json_schema: { name: 'city', schema, strict: true } };
const json = await client.chat.completions.create({ model, messages: chat.messages, max_tokens: 40, response_format: form });
told.json = JSON.parse(json.choices[0].message.content);
assert.ok(['Paris', 'Rome'].includes(told.json.city));

await assert.rejects(client.completions.create({ model: 'another', prompt: 'x' }), (error) => {
  told.error = error.code;
  return error.status === 404 && error.param === 'model';
});
console.log(JSON.stringify(told));
