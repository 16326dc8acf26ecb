// @ts-check
// Sends JSON to the server and reads JSON and server-sent events from it.

export class Problem extends Error {}

async function problemFrom(response) {
  const body = await response.json().catch(() => ({}));
  return new Problem(
    typeof body.detail === "string" ? body.detail : `The server answered with status ${response.status}.`,
  );
}

const postRequest = (body, signal) => ({
  method: "POST",
  headers: {"content-type": "application/json"},
  body: JSON.stringify(body),
  signal,
});

export async function get(path) {
  const response = await fetch(path);
  if (!response.ok) throw await problemFrom(response);
  return response.json();
}

export async function post(path, body, signal) {
  const response = await fetch(path, postRequest(body, signal));
  if (!response.ok) throw await problemFrom(response);
  return response.json();
}

// Yields the data of each event of a stream. Posts `body` if there is one. Calls `opened` when the server has answered.
// Throws `Problem` if the server answers with an error or sends a `failure` event.
/**
 * @param {string} path
 * @param {{body?: unknown, signal?: AbortSignal, opened?: () => void}} options
 */
export async function* stream(path, {body, signal, opened}) {
  const response = await fetch(path, body === undefined ? {signal} : postRequest(body, signal));
  if (!response.ok) throw await problemFrom(response);
  opened?.();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    yield* readEvents(chunksOf(reader));
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function* chunksOf(reader) {
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    yield value;
  }
}

// Yields the parsed JSON data of each event in the text chunks of an event stream, until the `done` event or the end.
/** @param {AsyncIterable<string> | Iterable<string>} chunks */
export async function* readEvents(chunks) {
  let rest = "";
  let name = "";
  let data = [];
  for await (const chunk of chunks) {
    const lines = (rest + chunk).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      else if (line.startsWith("event:")) name = line.slice(6).trim();
      else if (line === "" && data.length) {
        const value = JSON.parse(data.join("\n"));
        const kind = name;
        [name, data] = ["", []];
        if (kind === "done") return;
        if (kind === "failure") throw new Problem(value.detail ?? value.title);
        yield value;
      }
    }
  }
}
