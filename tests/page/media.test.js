// @ts-check
// Tests how the page shows images, documents and recordings, in a simulated page.

import assert from "node:assert/strict";
import {test} from "node:test";

import {JSDOM} from "jsdom";

import {mediaOf} from "../../toolbox_fastapi/dev_ui/page/dom.js";

const {window} = new JSDOM();
globalThis.document = window.document;

test("images and recordings can be seen, heard and saved", () => {
  const image = mediaOf({kind: "image", name: "image.png", url: "data:image/png;base64,AA=="});
  const audio = mediaOf({kind: "audio", name: "audio.wav", url: "data:audio/wav;base64,AA=="});

  assert.equal(image.querySelector("img").src, "data:image/png;base64,AA==");
  assert.equal(image.querySelector("a").download, "image.png");
  assert.equal(audio.querySelector("audio").src, "data:audio/wav;base64,AA==");
  assert.equal(audio.querySelector("a").getAttribute("href"), "data:audio/wav;base64,AA==");
});

test("a document can be saved", () => {
  const document = mediaOf({kind: "document", name: "bill.pdf", url: "data:application/pdf;base64,JVBERg=="});

  const save = document.querySelector("a");

  assert.equal(save.download, "bill.pdf");
  assert.equal(save.href, "data:application/pdf;base64,JVBERg==");
});

test("files of other servers are linked, not loaded, and other addresses are not links", () => {
  const remote = mediaOf({kind: "image", name: "image.png", url: "https://example.org/a.png"});
  const script = mediaOf({kind: "document", name: "a.pdf", url: "javascript:alert(1)"});

  assert.equal(remote.querySelector("img"), null);
  assert.equal(remote.querySelector("a").href, "https://example.org/a.png");
  assert.equal(script.querySelector("a"), null);
  assert.equal(script.textContent, "javascript:alert(1)");
});
