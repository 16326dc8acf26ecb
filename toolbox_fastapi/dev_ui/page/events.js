// Talking to the server: JSON one way, server-sent events the other.

export class Problem extends Error {}

async function problemOf(response) {
  const body = await response.json().catch(() => ({}));
  return new Problem(typeof body.detail === "string" ? body.detail : `The server answered ${response.status}.`);
}

const posting = (body, signal) =>
  ({method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify(body), signal});

export async function get(path) {
  const response = await fetch(path);
  if (!response.ok) throw await problemOf(response);
  return response.json();
}

export async function post(path, body, signal) {
  const response = await fetch(path, posting(body, signal));
  if (!response.ok) throw await problemOf(response);
  return response.json();
}

// The `data` of each event of a stream; with a body, it is posted. `opened` is called when the server has answered.
export async function* stream(path, {body, signal, opened}) {
  const response = await fetch(path, body === undefined ? {signal} : posting(body, signal));
  if (!response.ok) throw await problemOf(response);
  opened?.();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", event = "", data = [];
  try {
    for (;;) {
      const {value, done} = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        else if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line === "" && data.length) {
          const read = JSON.parse(data.join("\n")), kind = event;
          [event, data] = ["", []];
          if (kind === "done") return;
          if (kind === "failure") throw new Problem(read.detail ?? read.title);
          yield read;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
