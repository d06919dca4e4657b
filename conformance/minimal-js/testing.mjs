// SPDX-License-Identifier: Apache-2.0
// What the tests share. Damaged files are made from two good ones: all digests that stand before the damage are
// recomputed, so that the rule in question is the first to fail. With KVF_CASES=DIR they are also written there, for
// other readers.
import assert from 'node:assert/strict';
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { after } from 'node:test';
import { fileURLToPath } from 'node:url';
import { openArtifact } from './artifact.mjs';
import { hash, hex } from './digest.mjs';
import { canonical, parse } from './json.mjs';
import { align } from './semantics.mjs';
import { verify } from './verify.mjs';

export const here = (path) => fileURLToPath(new URL(path, import.meta.url));
export const WORKED = here('../../spec/examples/worked.kvf');
export const HEVC = here('testdata/hevc.kvf');
export const temporary = mkdtempSync(join(tmpdir(), 'kvf-'));
after(() => rmSync(temporary, { recursive: true }));

/** A file taken apart: manifest, tables by part, objects by record, each a buffer of its own. */
export function takeApart(path) {
  const file = Buffer.from(readFileSync(path));
  const M = Number(file.readBigUInt64LE(56));
  const manifest = parse(file.subarray(128, 128 + M));
  const dataAt = align(128 + M + Number(file.readBigUInt64LE(64)), manifest.segmentation.alignment);
  let at = 128 + M;
  const parts = [...manifest.qualities, ...manifest.tracks].map((part) => {
    const size = part.sets === undefined ? 128 : 64;
    const records = Array.from({ length: part.sets ?? part.segments }, () => {
      const record = Buffer.from(file.subarray(at, at += size));
      const offset = dataAt + Number(record.readBigUInt64LE(0));
      return { record, object: Buffer.from(file.subarray(offset, offset + Number(record.readBigUInt64LE(8)))) };
    });
    return { part, records };
  });
  return { manifest, parts };
}

/** Put a file together again. `options` keeps single steps from being done, or replaces bytes. */
export function putTogether({ manifest, parts }, options = {}) {
  const data = [];
  let cursor = 0;
  for (const { part, records } of parts) {
    if (!options.keepStarts) part.data_start = cursor;
    for (const { record, object } of records) {
      const gap = align(cursor, manifest.segmentation.alignment) - cursor;
      data.push(Buffer.alloc(gap, options.gapByte ?? 0), object);
      if (!options.keepOffsets) record.writeBigUInt64LE(BigInt(cursor + gap), 0);
      cursor += gap + object.length;
      if (!options.keepLengths) record.writeBigUInt64LE(BigInt(object.length), 8);
      if (!options.keepDigests) hash(object).copy(record, part.sets === undefined ? 64 : 16);
    }
    if (!options.keepStarts) part.data_stop = cursor;
    const digest = hex(Buffer.concat(records.map((r) => r.record)));
    if (!options.keepTableDigests) part[part.sets === undefined ? 'table_digest' : 'set_table_digest'] = digest;
  }
  if (!options.keepStarts) manifest.data_bytes = cursor;
  options.late?.(manifest);
  if (!options.keepContentId) {
    const { groups, identity, source_digest } = manifest;
    manifest.content_id = hex(Buffer.from(canonical({ groups, identity, source_digest })));
  }
  const json = options.json?.(canonical(manifest)) ?? canonical(manifest);
  const bytes = Buffer.isBuffer(json) ? json : Buffer.from(json);
  const tables = Buffer.concat(parts.flatMap((p) => p.records.map((r) => r.record)));
  const front = 128 + bytes.length + tables.length;
  const zeros = Buffer.alloc(align(front, manifest.segmentation.alignment === 4096 ? 4096 : 1) - front, options.gapByte ?? 0);
  const header = Buffer.alloc(128);
  Buffer.from('894b56460d0a1a0a00000900', 'hex').copy(header);
  header.writeUInt32LE(128, 12);
  [front + zeros.length + cursor, bytes.length, tables.length].forEach((n, i) => header.writeBigUInt64LE(BigInt(n), 48 + 8 * i));
  hash(bytes).copy(header, 72);
  options.header?.(header);
  seal(header);
  return Buffer.concat([header, bytes, tables, zeros, ...data]);
}

export const seal = (file) => hash(Buffer.concat([file.subarray(0, 16), file.subarray(48, 128)])).copy(file, 16);

let cases = 0;
/** What verification answers: "ok" or a code. */
export async function answer(bytes, name = 'x') {
  const path = join(temporary, `${cases++}.kvf`);
  writeFileSync(path, bytes);
  if (process.env.KVF_CASES) {
    writeFileSync(join(process.env.KVF_CASES, `${String(cases).padStart(3, '0')}-${name.replace(/\W+/g, '-')}.kvf`), bytes);
  }
  let artifact;
  try {
    artifact = await openArtifact(path);
    await verify(artifact);
    return 'ok';
  } catch (error) {
    if (error.code === undefined || error.verdict === undefined) throw error;
    return error.code;
  } finally {
    await artifact?.close();
    rmSync(path);
  }
}

/** One damaged file: `change` edits the parts, `options` are those of putTogether. */
export async function expectCode(code, name, change, options, from = WORKED) {
  const file = takeApart(from);
  const more = change?.(file.manifest, file.parts) ?? {};
  assert.equal(await answer(putTogether(file, { ...options, ...more }), name), code, name);
}

export const sources = Object.fromEntries([['worked', WORKED], ['hevc', HEVC]].map(([k, v]) => [k, readFileSync(v)]));

export function cli(...args) {
  const { status, stdout, stderr } = spawnSync(process.execPath, [here('kvf.mjs'), ...args], { encoding: 'utf8' });
  return { status, stderr, ...JSON.parse(stdout) };
}
