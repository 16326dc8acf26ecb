// Uses an MCP server with the TypeScript SDK, and prints what it got as JSON.
// Arguments: the folder of the SDK, then the URL of the server, or a command with its arguments.

const [sdk, target, ...args] = process.argv.slice(2);
const {Client} = await import(`${sdk}/dist/esm/client/index.js`);
const {StreamableHTTPClientTransport} = await import(`${sdk}/dist/esm/client/streamableHttp.js`);
const {StdioClientTransport} = await import(`${sdk}/dist/esm/client/stdio.js`);

const transport = target.startsWith("http")
  ? new StreamableHTTPClientTransport(new URL(target))
  : new StdioClientTransport({command: target, args});
const client = new Client({name: "compat", version: "1"});
await client.connect(transport);

// The SDK loses a notification that it reads together with the response that follows it, so what arrives is kept too.
const arrived = [];
const receive = transport.onmessage;
transport.onmessage = (message, extra) => {
  if (message.method === "notifications/progress") {
    arrived.push([message.params.progress, message.params.total ?? null]);
  }
  receive(message, extra);
};
const heard = [];
const found = {
  tools: (await client.listTools()).tools.map(each => each.name),
  sum: await client.callTool({name: "add", arguments: {a: 2, b: 3}}),
  wrong: await client.callTool({name: "add", arguments: {a: "many"}}),
  counted: await client.callTool({name: "count", arguments: {}}, undefined, {
    onprogress: each => heard.push([each.progress, each.total ?? null]),
  }),
  resources: (await client.listResources()).resources.map(each => each.uri),
  templates: (await client.listResourceTemplates()).resourceTemplates.map(each => each.uriTemplate),
  note: await client.readResource({uri: "notes://7"}),
  prompts: (await client.listPrompts()).prompts.map(each => each.name),
  prompt: await client.getPrompt({name: "greet", arguments: {name: "Ann"}}),
};
console.log(JSON.stringify({...found, progress: arrived, heard}));
await client.close();
