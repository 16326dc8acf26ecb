// @ts-check
// The parts of the script that both pages share: the form, its examples, and requests.

/** Return the element with this id. @param {string} id @returns {any} */
export const at = id => document.getElementById(id);

/**
 * Send a value as JSON. Return the response and its decoded body, which is empty if it is not JSON.
 * @param {string} path
 * @param {unknown} value
 */
export async function post(path, value) {
  const response = await fetch(path, {
    method: "POST",
    headers: {"content-type": "application/json"},
    body: JSON.stringify(value),
  });
  return {response, body: await response.json().catch(() => ({}))};
}

/**
 * Call `send(text)` for each text that the user submits, also by a click on an example.
 * @param {HTMLInputElement} input
 * @param {(text: string) => void} send
 */
export function onSubmit(input, send) {
  at("form").addEventListener("submit", event => {
    event.preventDefault();
    const text = input.value.trim();
    if (text && !at("send").disabled) send(text);
  });
  for (const example of document.querySelectorAll(".examples button"))
    example.addEventListener("click", () => {
      input.value = example.textContent ?? "";
      at("form").requestSubmit();
    });
}
