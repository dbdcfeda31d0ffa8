// Plays an episode with the AI SDK: node ai_sdk.mjs CLIENT PROMPT, where CLIENT is the folder that has it.
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const [folder, prompt] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const [{ generateText, tool, stepCountIs }, { openai }, { z }] = await Promise.all(['ai', '@ai-sdk/openai', 'zod'].map(load));

const show = tool({
  description: 'Show a digit.',
  inputSchema: z.object({ digit: z.number() }),
  execute: async ({ digit }) => String(digit),
});
const { text } = await generateText({ model: openai('policy'), tools: { show }, stopWhen: stepCountIs(6), prompt });
console.log(text);
