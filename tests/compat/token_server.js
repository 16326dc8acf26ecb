// An OAuth server of another author, @jmondi/oauth2-server, with client credentials and token exchange (RFC 8693).
// The arguments are the folder of the package and the secret of the client "desk". It prints its port. Its tokens are
// JSON Web Tokens. The token of a user is "user:NAME".
import {createServer} from "node:http";
import {pathToFileURL} from "node:url";

const [folder, secret] = process.argv.slice(2);
const {AuthorizationServer, DateInterval, JwtService, OAuthException} = await import(
  pathToFileURL(`${folder}/dist/index.js`)
);

const exchange = "urn:ietf:params:oauth:grant-type:token-exchange";
const client = {
  id: "desk",
  name: "desk",
  secret,
  redirectUris: [],
  allowedGrants: ["client_credentials", exchange],
  scopes: [],
};
const clients = {
  getByIdentifier: async () => client,
  isClientValid: async (grant, found, given) => given === found.secret,
};
const tokens = {
  issueToken: async (found, scopes, user) => ({
    accessToken: `token-${Math.random()}`,
    accessTokenExpiresAt: new Date(Date.now() + 3_600_000),
    client: found,
    user,
    scopes,
  }),
  persist: async () => undefined,
};
const scopes = {
  getAllByIdentifiers: async names => names.map(name => ({name})),
  finalize: async found => found,
};

const server = new AuthorizationServer(clients, tokens, scopes, new JwtService("a secret of the server"));
server.enableGrantType("client_credentials", new DateInterval("1h"));
server.enableGrantType({
  grant: exchange,
  processTokenExchange: async ({subjectToken}) => {
    if (!subjectToken.startsWith("user:")) throw OAuthException.invalidGrant("unknown subject token");
    return {id: subjectToken.slice("user:".length)};
  },
});

const http = createServer(async (request, response) => {
  let text = "";
  for await (const chunk of request) text += chunk;
  const body = Object.fromEntries(new URLSearchParams(text));
  let reply;
  try {
    reply = await server.respondToAccessTokenRequest({headers: request.headers, query: {}, body});
  } catch (error) {
    reply = {status: error.status ?? 500, headers: {}, body: {error: error.errorType ?? "server_error"}};
  }
  response.writeHead(reply.status, {...reply.headers, "content-type": "application/json"});
  response.end(JSON.stringify(reply.body));
});
http.listen(0, "127.0.0.1", () => console.log(http.address().port));
