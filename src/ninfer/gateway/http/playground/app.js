// The page: what is typed, clicked and shown. What can be computed without it is in core.js.

import {
  EventReader, addEvent, assistantMessage, choices, newAnswer, parseTools, pretty, refusal, requestBody, segments,
  statistics, totals,
} from "./core.js";

const CHECK_DELAY = 250; // milliseconds without a keystroke before an output form is checked

const at = (id) => document.getElementById(id);
let turns = []; // { message, element, answer }: what was said, in order; answer is null for user and tool messages
let running = null; // the AbortController of the answer that is coming
let model = "";

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

function post(path, body, signal) {
  return fetch(path, { method: "POST", headers: { "content-type": "application/json", ...keyHeader() }, body, signal });
}

function keyHeader() {
  const key = at("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

function settings() {
  return {
    model, system: at("system").value, temperature: at("temperature").value, maxTokens: at("max-tokens").value,
    seed: at("seed").value, effort: at("effort").value, tools: at("tools").value, form: form(),
  };
}

function form() {
  return { kind: at("form").value, text: at("form-text").value };
}

async function loadModel() {
  try {
    const response = await fetch("v1/models", { headers: keyHeader() });
    const text = await response.text();
    if (!response.ok) throw new Error(refusal(response.status, text));
    model = JSON.parse(text).data[0].id;
    at("model").textContent = model;
    at("problem").textContent = "";
  } catch (error) {
    at("model").textContent = "…";
    at("problem").textContent = error.message;
  }
}

// -- turns ---------------------------------------------------------------------------------------------------

function addTurn(message, answer = null) {
  const element = make("li", message.role);
  element.append(make("div", "who", { user: "You", tool: "Tool", assistant: model }[message.role]));
  if (answer === null) element.append(make("div", "text", message.content));
  at("log").append(element);
  const turn = { message, element, answer };
  turns.push(turn);
  element.scrollIntoView({ block: "end" });
  return turn;
}

function dropTurns(count) {
  for (const { element } of turns.splice(turns.length - count)) element.remove();
}

// Ask for the next turn of the assistant, and show it as it comes.
async function answerTurns() {
  const asked = settings(), messages = turns.map(({ message }) => message);
  const answer = newAnswer(performance.now());
  const turn = addTurn({ role: "assistant" }, answer);
  const view = answerView(turn.element);
  running = new AbortController();
  showRunning();
  try {
    await readAnswer(requestBody(asked, messages), answer, running.signal, view);
  } catch (error) {
    if (error.name !== "AbortError") answer.error = error.message;
  }
  running = null;
  view.draw(answer);
  turn.message = assistantMessage(answer);
  at("problem").textContent = answer.error ?? "";
  if (turn.message === null || answer.error) {
    // Nothing to build on: the question goes back to where it was typed.
    const question = turns.at(-2);
    const retyped = answer.error && question.message.role === "user";
    dropTurns(retyped ? 2 : 1);
    if (retyped && at("prompt").value === "") at("prompt").value = question.message.content;
  } else {
    if (answer.calls.length) askForResults(turn);
    await showMembership(asked.form, answer, view);
  }
  showRunning();
}

async function readAnswer(body, answer, signal, view) {
  const response = await post("v1/chat/completions", body, signal);
  if (!response.ok) throw new Error(refusal(response.status, await response.text()));
  const events = new EventReader();
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const now = performance.now();
    for (const data of events.feed(decoder.decode(value, { stream: true }))) addEvent(answer, data, now);
    view.schedule(answer);
  }
  if (answer.finish === null && answer.error === null) throw new Error("the answer broke off");
}

// The parts of an answer on the page; drawn at most once a frame.
function answerView(element) {
  const thinking = make("details"), thought = make("div", "text"), content = make("div"), calls = make("div");
  thinking.append(make("summary", "", "Thinking"), thought);
  thinking.hidden = true;
  const line = make("div", "statistics"), membership = make("div", "state");
  element.append(thinking, content, calls, line, membership);
  let scheduled = false;

  function draw(answer) {
    scheduled = false;
    const log = at("log");
    const followed = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    thinking.hidden = answer.thinking === "";
    thought.textContent = answer.thinking;
    content.replaceChildren(...segments(answer.content).map(({ code, text }) => make(code ? "pre" : "div", "text", text)));
    calls.replaceChildren(...answer.calls.map(callView));
    line.textContent = statistics(answer);
    if (followed) log.scrollTop = log.scrollHeight;
  }

  function schedule(answer) {
    if (!scheduled) requestAnimationFrame(() => draw(answer));
    scheduled = true;
  }
  return { draw, schedule, membership };
}

function callView({ name, arguments: text }) {
  const call = make("div", "call");
  call.append(make("code", "", name), make("pre", "", pretty(text)));
  return call;
}

// Fields for what the called tools return; sending them goes on with the answer.
function askForResults(turn) {
  const fields = turn.answer.calls.map(({ id, name }) => {
    const label = make("label", "", `Result of ${name}`), field = make("textarea");
    field.rows = 2;
    label.append(field);
    return { id, label, field };
  });
  const results = make("form", "call"), send = make("button", "", "Send results");
  send.type = "submit";
  results.append(...fields.map(({ label }) => label), send);
  results.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || turn !== turns.at(-1)) return;
    results.remove();
    for (const { id, field } of fields) addTurn({ role: "tool", tool_call_id: id, content: field.value });
    answerTurns();
  });
  turn.element.append(results);
  fields[0].field.focus();
}

async function showMembership(asked, answer, view) {
  if (!asked.kind || answer.calls.length) return;
  const checked = await check(asked, answer.content);
  if (checked.accepts === undefined) return;
  view.membership.textContent = checked.accepts ? "✓ in the output form" : "✗ not (yet) in the output form";
  view.membership.className = checked.accepts ? "state valid" : "state invalid";
}

function showRunning() {
  at("send").disabled = running !== null;
  at("stop").hidden = running === null;
  at("retry").disabled = running !== null || !turns.some(({ message }) => message?.role === "user");
  at("log").setAttribute("aria-busy", String(running !== null));
  at("totals").textContent = turns.length ? totals(turns.flatMap(({ answer }) => answer ?? [])) : "";
}

// -- live validity -------------------------------------------------------------------------------------------

// What the server says about an output form, and about a text under it.
async function check({ kind, text }, answer) {
  const source = kind === "choice" ? choices(text) : text;
  try {
    const response = await post("playground/check", JSON.stringify({ kind, source, text: answer }));
    const said = await response.text();
    return response.ok ? JSON.parse(said) : { error: refusal(response.status, said) };
  } catch (error) {
    return { error: error.message };
  }
}

let checks = 0;
let timer = 0;

function formChanged() {
  const { kind } = form();
  at("form-editor").hidden = kind === "" || kind === "json_object";
  clearTimeout(timer);
  const mine = ++checks;
  timer = setTimeout(async () => {
    if (at("form-editor").hidden) return;
    const checked = await check(form());
    if (mine === checks) showState("form-state", checked.error ?? null);
  }, CHECK_DELAY);
}

function toolsChanged() {
  try {
    showState("tools-state", parseTools(at("tools").value).length ? null : "");
  } catch (error) {
    showState("tools-state", error.message);
  }
}

// error: null for valid, "" for nothing to say.
function showState(id, error) {
  at(id).textContent = error ?? "✓ valid";
  at(id).className = error ? "state invalid" : "state valid";
  const field = id === "form-state" ? "form-text" : "tools";
  at(field).setAttribute("aria-invalid", String(Boolean(error)));
}

// -- events --------------------------------------------------------------------------------------------------

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("prompt").value;
  if (running || text.trim() === "") return;
  at("prompt").value = "";
  addTurn({ role: "user", content: text });
  answerTurns();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("retry").addEventListener("click", () => {
  const last = turns.findLastIndex(({ message }) => message.role === "user");
  dropTurns(turns.length - 1 - last);
  answerTurns();
});
at("clear").addEventListener("click", () => {
  running?.abort();
  dropTurns(turns.length);
  at("problem").textContent = "";
  showRunning();
  at("prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
at("key").addEventListener("change", loadModel);
at("form").addEventListener("change", formChanged);
at("form-text").addEventListener("input", formChanged);
at("tools").addEventListener("input", toolsChanged);
loadModel();
formChanged();
toolsChanged();
