// What the page computes. No document and no network here: the tests run this file without a browser.

// Events of a text/event-stream, out of pieces cut anywhere.
export class EventReader {
  #rest = "";
  #data = [];

  // Take a piece of text; return the data of the events it completes.
  feed(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "" && this.#data.length) {
        events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(5).replace(/^ /, ""));
      }
    }
    return events;
  }
}

// One answer as it grows. Times are milliseconds of one clock; pieces and early count what came, and what came first.
export function newAnswer(now) {
  return {
    thinking: "", content: "", calls: [], finish: null, usage: null, error: null,
    begun: now, first: null, last: null, pieces: 0, early: 0,
  };
}

// Add the data of one event of a chat completion's stream. Events that were read together have one time.
export function addEvent(answer, data, now) {
  if (data === "[DONE]") return;
  const chunk = JSON.parse(data);
  if (chunk.error) {
    answer.error = chunk.error.message;
    return;
  }
  if (chunk.usage) answer.usage = chunk.usage;
  for (const { delta, finish_reason } of chunk.choices ?? []) {
    answer.thinking += delta.reasoning_content ?? "";
    answer.content += delta.content ?? "";
    for (const { id, function: called } of delta.tool_calls ?? []) {
      answer.calls.push({ id, name: called.name, arguments: called.arguments });
    }
    if (delta.reasoning_content || delta.content || delta.tool_calls) {
      answer.first ??= now;
      answer.last = now;
      answer.pieces += 1;
      if (now === answer.first) answer.early += 1;
    }
    if (finish_reason) answer.finish = finish_reason;
  }
}

// The turn as the next request repeats it; null when nothing was said.
export function assistantMessage(answer) {
  if (!answer.content && !answer.calls.length) return null;
  const message = { role: "assistant", content: answer.content };
  if (answer.thinking) message.reasoning_content = answer.thinking;
  if (answer.calls.length) {
    message.tool_calls = answer.calls.map(({ id, name, arguments: text }) => (
      { id, type: "function", function: { name, arguments: text } }
    ));
  }
  return message;
}

// The body of a request, as text: a schema goes in as it was typed, since reading it would reorder names and respell
// numbers.
export function requestBody(settings, messages) {
  const said = settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages;
  const body = { model: settings.model, messages: said, stream: true, stream_options: { include_usage: true } };
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (settings.maxTokens !== "") body.max_completion_tokens = Number(settings.maxTokens);
  if (settings.seed !== "") body.seed = Number(settings.seed);
  if (settings.effort) body.reasoning_effort = settings.effort;
  const tools = parseTools(settings.tools);
  if (tools.length) body.tools = tools;
  const { kind, text } = settings.form;
  if (kind === "json_object") body.response_format = { type: "json_object" };
  else if (kind === "choice") body.structured_outputs = { choice: choices(text) };
  else if (kind === "regex" || kind === "grammar") body.structured_outputs = { [kind]: text };
  const json = JSON.stringify(body);
  if (kind !== "json_schema") return json;
  const format = `{"type":"json_schema","json_schema":{"name":"answer","schema":${text}}}`;
  return `${json.slice(0, -1)},"response_format":${format}}`;
}

// One choice a line; empty lines are none.
export function choices(text) {
  return text.split("\n").filter((line) => line !== "");
}

// A tools field: empty, or a JSON array. Throws an Error that says where it is wrong.
export function parseTools(text) {
  if (text.trim() === "") return [];
  const tools = parseJson(text);
  if (!Array.isArray(tools)) throw new Error("expected a JSON array of tools");
  for (const [i, tool] of tools.entries()) {
    if (typeof tool?.function?.name !== "string") throw new Error(`tool ${i} has no function.name`);
  }
  return tools;
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`not JSON: ${error.message}`);
  }
}

// What an answer took. Its speed is that of the tokens after those that came first, where it did not come all at once.
export function statistics(answer) {
  const parts = [];
  const { usage, begun, first, last } = answer;
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const thinking = usage.completion_tokens_details?.reasoning_tokens ?? 0;
    parts.push(`${usage.prompt_tokens} prompt tokens` + (cached ? ` (${cached} from the cache)` : ""));
    parts.push(`${usage.completion_tokens} tokens` + (thinking ? ` (${thinking} thinking)` : ""));
  }
  if (first !== null) parts.push(`first after ${Math.round(first - begun)} ms`);
  if (usage && last > first) {
    const later = usage.completion_tokens * (1 - answer.early / answer.pieces);
    parts.push(`${(later / (last - first) * 1000).toFixed(0)} tok/s`);
  } else if (usage && last > begun) {
    parts.push(`${(usage.completion_tokens / (last - begun) * 1000).toFixed(0)} tok/s with the prompt`);
  }
  if (answer.finish === "length") parts.push("cut: the budget is used up");
  return parts.join(" · ");
}

// Sums over the answers of a conversation, and the share of the prompts that came out of the cache.
export function totals(answers) {
  let prompt = 0, cached = 0, completion = 0;
  for (const { usage } of answers) {
    prompt += usage?.prompt_tokens ?? 0;
    cached += usage?.prompt_tokens_details?.cached_tokens ?? 0;
    completion += usage?.completion_tokens ?? 0;
  }
  const share = prompt ? Math.round(cached / prompt * 100) : 0;
  return `${prompt} prompt tokens, ${share} % from the cache · ${completion} generated`;
}

// What a refused request says, whatever its body was.
export function refusal(status, text) {
  try {
    const { message } = JSON.parse(text).error;
    if (message) return message;
  } catch {
    // Not the server's own words: a proxy's, perhaps.
  }
  return `the server answered ${status}`;
}

// Text in pieces: prose, and code between ``` fences, the last of which may still be open.
export function segments(text) {
  const found = [];
  let code = null, lines = [];
  const end = () => {
    if (lines.length) found.push({ code: code !== null, language: code ?? "", text: lines.join("\n") });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const fence = line.match(/^\s*```\s*(\S*)\s*$/);
    if (fence === null || (code !== null && fence[1])) {
      lines.push(line);
      continue;
    }
    end();
    code = code === null ? fence[1] : null;
  }
  end();
  return found;
}

// Indented, where it is JSON.
export function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
