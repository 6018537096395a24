// Checks vectors.json against identity.md, written from that page alone.
// Usage: node check_vectors.mjs [vectors.json]     Exit status: 0 if all agree, 1 if one does not.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

const TEXT = 1, UINT = 2, UINTS = 3;
const FIELDS = [
  [1, "model", TEXT], [2, "revision", TEXT], [3, "dtype", TEXT], [4, "block_tokens", UINT],
  [5, "layers", UINT], [6, "ranks", UINT], [7, "part_bytes", UINTS], [8, "layout", TEXT],
  [9, "tenant", TEXT], [10, "hash_scheme", TEXT], [11, "adapter", TEXT],
  [12, "adapter_revision", TEXT], [13, "quantisation", TEXT], [14, "salt", TEXT],
];

const sha256 = (...pieces) => createHash("sha256").update(Buffer.concat(pieces)).digest();

function integer(value, size) {
  const bytes = Buffer.alloc(size);
  for (let i = 0, rest = BigInt(value); i < size; i++, rest >>= 8n) bytes[i] = Number(rest & 0xffn);
  return bytes;
}

const sized = (bytes) => Buffer.concat([integer(bytes.length, 4), bytes]);

function encode(spec) {
  const pieces = [Buffer.from("kvstore/spec/v1\0")];
  for (const [number, name, type] of FIELDS) {
    if (!(name in spec)) continue;
    const payload = type === TEXT
      ? Buffer.from(spec[name], "utf8")
      : Buffer.concat([spec[name]].flat().map((value) => integer(value, 8)));
    pieces.push(integer(number, 2), integer(type, 1), sized(payload));
  }
  return Buffer.concat(pieces);
}

function chain(root, { block_tokens, token_ids, extra_keys }) {
  const hashes = [];
  for (let end = block_tokens; end <= token_ids.length; end += block_tokens) {
    const keys = extra_keys[hashes.length] ?? [];
    hashes.push(sha256(
      Buffer.from("kvstore/block/v1\0"),
      hashes.at(-1) ?? root,
      integer(block_tokens, 4),
      ...token_ids.slice(end - block_tokens, end).map((id) => integer(id, 4)),
      integer(keys.length, 4),
      ...keys.flatMap(({ kind, digest }) => [sized(Buffer.from(kind, "utf8")), sized(Buffer.from(digest, "hex"))]),
    ));
  }
  return hashes;
}

const path = process.argv[2] ?? new URL("vectors.json", import.meta.url);
const vectors = JSON.parse(readFileSync(path, "utf8"));
let wrong = 0;

function check(what, expected, computed) {
  if (expected === computed) return;
  console.error(`${what}: the file has ${expected}, computed ${computed}`);
  wrong++;
}

const namespaces = new Map();
for (const { name, spec, encoding, namespace } of vectors.specs) {
  const bytes = encode(spec);
  namespaces.set(name, sha256(bytes));
  check(`spec '${name}', encoding`, encoding, bytes.toString("hex"));
  check(`spec '${name}', namespace`, namespace, namespaces.get(name).toString("hex"));
}
for (const vector of vectors.chains) {
  const root = sha256(Buffer.from("kvstore/root/v1\0"), namespaces.get(vector.spec));
  check(`chain '${vector.name}', root`, vector.root, root.toString("hex"));
  check(`chain '${vector.name}', hashes`, vector.hashes.join(), chain(root, vector).map((h) => h.toString("hex")).join());
}
console.log(`${vectors.specs.length} specs and ${vectors.chains.length} chains checked, ${wrong} values wrong`);
process.exitCode = wrong ? 1 : 0;
