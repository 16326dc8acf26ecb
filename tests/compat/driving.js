// What the drivers of the clients share: requests that are kept, connections that break, gestures by name.

import {createInterface} from "node:readline";

export async function until(condition, what) {
  for (const start = Date.now(); !condition(); await new Promise(go => setTimeout(go, 3))) {
    if (Date.now() - start > 10_000) throw new Error(`waited in vain for ${what ?? condition}`);
  }
}

// The part of a page that talks to the server. `requests` are those that it sent, in order, with their status.
export class Connection {
  constructor(url) {
    this.url = url;
    this.requests = [];
    this.cut = Infinity; // the number of frames after which the connection breaks
  }

  async fetch(address, init = {}) {
    const request = {method: init.method ?? "GET", path: new URL(address, this.url).pathname};
    if (init.body) request.body = JSON.parse(init.body);
    this.requests.push(request);
    const response = await fetch(new URL(address, this.url), init);
    request.status = response.status;
    const left = this.cut;
    this.cut = Infinity;
    return left === Infinity ? response : new Response(breakAfter(response.body, left), response);
  }

  async json(path, method = "GET") {
    return (await this.fetch(path, {method})).json();
  }
}

function breakAfter(body, left) {
  const reader = body.getReader();
  return new ReadableStream({
    async pull(controller) {
      const {done, value} = await reader.read();
      if (done) return controller.close();
      for (const frame of new TextDecoder()
        .decode(value)
        .split(/(?<=\n\n)/)
        .slice(0, left)) {
        controller.enqueue(new TextEncoder().encode(frame));
        left--;
      }
      if (left > 0) return;
      await new Promise(go => setTimeout(go, 50)); // an error throws away what was not read
      controller.error(new TypeError("network error"));
      await reader.cancel();
    },
  });
}

// Reads `{"url": …, "gesture": …}` from each line of the input, makes the gesture on a new page, and prints what the page
// shows, as a line of JSON.
export async function drive(gestures, makePage) {
  process.on("unhandledRejection", () => {}); // the client of AG-UI leaves that of a broken connection behind
  for await (const line of createInterface({input: process.stdin})) {
    const {url, gesture} = JSON.parse(line);
    const page = await makePage(new Connection(url));
    let failure = null;
    try {
      if (!(gesture in gestures)) throw new Error(`unknown gesture ${gesture}`);
      const late = new Promise((_, fail) => setTimeout(fail, 20_000, new Error("the gesture takes too long")));
      await Promise.race([gestures[gesture](page), late]);
    } catch (error) {
      failure = String(error?.stack ?? error);
    }
    console.log(JSON.stringify({...page.shows(), requests: page.connection.requests, failure}));
  }
  process.exit(0);
}
