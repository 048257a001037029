// A gRPC client in another language: `node client.js ADDRESS PROTO_DIR[:...] FILE package.Service/Method REQUEST_JSON`.
// Prints each reply as a line of JSON; what fails, as {"code", "details"} with exit status 1.
"use strict";

const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, protoDirs, file, method, request] = process.argv.slice(2);
const [service, name] = method.split("/");
const asWritten = { includeDirs: protoDirs.split(":"), keepCase: true, longs: Number, enums: String, defaults: true };
const definition = loader.loadSync(file, asWritten);
const Client = service.split(".").reduce((found, part) => found[part], grpc.loadPackageDefinition(definition));
const client = new Client(address, grpc.credentials.createInsecure());
const options = { deadline: Date.now() + 30000 };
// JSON has no bytes: {"base64": "..."} stands for them.
const message = JSON.parse(request, (_, value) =>
  value && value.base64 !== undefined ? Buffer.from(value.base64, "base64") : value);
const tell = (reply) =>
  console.log(JSON.stringify(reply, (_, value) =>
    value && value.type === "Buffer" ? { base64: Buffer.from(value.data).toString("base64") } : value));

function failed(error) {
  console.log(JSON.stringify({ code: error.code, details: error.details }));
  process.exitCode = 1;
  client.close();
}

if (Client.service[name].responseStream) {
  client[name](message, new grpc.Metadata(), options).on("data", tell).on("error", failed).on("end", () => client.close());
} else {
  client[name](message, new grpc.Metadata(), options, (error, reply) => {
    if (error) return failed(error);
    tell(reply);
    client.close();
  });
}
