// SPDX-License-Identifier: Apache-2.0
// node --test: what the writer writes, read back by the reader.
import assert from 'node:assert/strict';
import { spawn } from 'node:child_process';
import { on, once } from 'node:events';
import { mkdirSync, readFileSync, readdirSync, rmSync, watch, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { test } from 'node:test';
import { openArtifact } from './artifact.mjs';
import { Chain } from './chain.mjs';
import { encode } from './encode.mjs';
import { numbers } from './quantise.mjs';
import { restoreTo, select } from './restore.mjs';
import { setRecord } from './tables.mjs';
import { WORKED, cli, here, takeApart, temporary } from './testing.mjs';
import { verify } from './verify.mjs';

const ALL = ['near-lossless/stored', 'near-lossless/zstd', 'exact/stored', 'exact/zstd'];
const { manifest: worked } = takeApart(WORKED);
const unbound = { ...worked.identity, kind: 'unbound', layers_total: 64 };
const group = (change) => ({
  dtype: 'float16', file: 'x.bin', head_dim: 8, head_start: 0, heads: 4, heads_total: 4, layers: [0, 2, 3, 5, 7], name: 'key', role: 'key',
  tokens: { kind: 'all' }, ...change,
});
const description = (change) => ({
  content: [], first_position: 0, groups: [group()], identity: unbound, restored_from: null, salt: null, segmentation: null, token_count: 50,
  token_ids: null, tracks: ALL, valid_lengths: null, ...change,
});

let count = 0;
/** Encode; returns the path of the artifact. `files` are bytes by name. */
async function written(spec, files) {
  const folder = join(temporary, `encode-${count++}`);
  mkdirSync(folder);
  writeFileSync(join(folder, 'spec.json'), JSON.stringify(spec));
  for (const [name, bytes] of Object.entries(files)) writeFileSync(join(folder, name), bytes);
  const output = join(folder, 'out.kvf');
  try {
    await encode(join(folder, 'spec.json'), output, 'test');
  } catch (error) {
    assert.ok(!readdirSync(folder).some((name) => name.startsWith('out.kvf')), 'nothing is left behind (ERR-4)');
    throw error;
  }
  return output;
}

/** Verify, and restore every track: {manifest, track name: bytes}. */
async function readBack(path) {
  const artifact = await openArtifact(path);
  const { manifest: m } = artifact;
  await verify(artifact);
  const tracks = {};
  for (const track of m.tracks) {
    const output = join(temporary, 'restored');
    await restoreTo(output, artifact, track, select(m, {}));
    tracks[track.name] = readFileSync(output);
    rmSync(output);
  }
  await artifact.close();
  return { manifest: m, ...tracks };
}

/** Elements [layer, token, head, dim] of a waxing pattern in some dtype. */
function tensor(dtype, elements, seed = 1) {
  const bits = { float32: 4, float16: 2, bfloat16: 2, float8_e4m3fn: 1, float8_e5m2: 1, uint8: 1 }[dtype];
  const out = Buffer.alloc(elements * bits);
  let state = seed;
  for (let i = 0; i < elements; i++) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    const x = ((state >>> 8) / 2 ** 23 - 1) * (1 + (i % 8));
    const word = new Uint32Array(new Float32Array([x]).buffer)[0];
    if (dtype === 'float32') out.writeUInt32LE(word, 4 * i);
    else if (dtype === 'bfloat16') out.writeUInt16LE(word >>> 16, 2 * i);
    else if (bits === 2) out.writeUInt16LE(0x3800 + (state >>> 22) + (x < 0 ? 0x8000 : 0), 2 * i);
    else out[i] = dtype === 'uint8' ? state >>> 24 : 0x30 + (state >>> 28) + (x < 0 ? 0x80 : 0);
  }
  return out;
}

test('the input of Appendix A has its digests', async () => {
  const input = { key: Buffer.alloc(112), value: Buffer.alloc(112) };
  const half = (x) => { // exact in binary16
    const word = new Uint32Array(new Float32Array([x]).buffer)[0];
    return x === 0 ? 0 : ((word >>> 16) & 0x8000) | ((((word >>> 23) & 255) - 112) << 10) | ((word >>> 13) & 0x3ff);
  };
  for (let i = 0; i < 56; i++) {
    const [l, t, d] = [Math.floor(i / 28), Math.floor(i / 4) % 7, i % 4];
    input.key.writeUInt16LE(half(((3 * l + 5 * t + 2 * d * d) % 7 - 3) * (1 + (3 * d) % 4) / 4 + d - 1), 2 * i);
    input.value.writeUInt16LE(half(((5 * l + 3 * t + 4 * d) % 11 - 5) * 2 ** (2 - d) / 8), 2 * i);
  }
  const groups = worked.groups.map((g) => ({ ...g, file: g.name }));
  const token_ids = [0, 1, 2, 3, 4, 5, 6].map((t) => 5 + 1000 * t);
  const { manifest: m } = await readBack(await written(description({ groups, identity: worked.identity, token_count: 7, token_ids }), input));
  for (const member of ['content_id', 'source_digest', 'groups', 'identity', 'tokens', 'lineage', 'valid_lengths']) {
    assert.deepEqual(m[member], worked[member], member);
  }
});

test('every dtype, order, alignment and cut restores', async () => {
  const x = {};
  for (const dtype of ['float32', 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'uint8']) {
    x[dtype] = tensor(dtype, 5 * 50 * 4 * 8);
    for (const segmentation of [null, { alignment: 4096, order: 'layer-major', tokens: 16 }]) {
      const tracks = dtype === 'uint8' ? ALL.slice(2) : ALL;
      const back = await readBack(await written(description({ groups: [group({ dtype })], segmentation, tracks }), { 'x.bin': x[dtype] }));
      assert.deepEqual(back['exact/stored'], x[dtype], dtype);
      assert.deepEqual(back['exact/zstd'], x[dtype], dtype);
      if (dtype === 'uint8') continue;
      assert.deepEqual(back['near-lossless/stored'], back['near-lossless/zstd']);
      const [a, b] = [x[dtype], back['near-lossless/stored']].map((bytes) => numbers(bytes, dtype, 'x'));
      const power = (values) => values.reduce((sum, v) => sum + v * v, 0);
      // Half a step of 0.28 is the largest error; the dtype itself adds to it where it is coarse.
      assert.ok(power(a.map((v, i) => v - b[i])) < 0.15 ** 2 * power(a), dtype);
    }
  }
});

test('windows, states and bytes beside quantised groups; no tokens at all', async () => {
  const groups = [
    group(), group({ name: 'near', role: 'value', file: 'near', tokens: { kind: 'window', held_start: 30, cumulative_tokens: 50 } }),
    group({ name: 'rec', role: 'state', file: 'rec', tokens: { kind: 'state', shape: [2, 4] } }), group({ name: 'raw', role: 'indexer', dtype: 'uint8', file: 'raw' }),
  ];
  const files = { 'x.bin': tensor('float16', 8000), near: tensor('float16', 3200, 2), rec: tensor('float16', 160, 3), raw: tensor('uint8', 8000) };
  const whole = Buffer.concat(Object.values(files));
  const back = await readBack(await written(description({ groups, valid_lengths: [50], segmentation: { alignment: 1, order: 'layer-major', tokens: 7 } }), files));
  assert.deepEqual(back['exact/zstd'], whole);
  assert.deepEqual(back['near-lossless/zstd'].subarray(16000 + 6400), whole.subarray(16000 + 6400), 'state and bytes are exact (QUA-3)');
  const none = await readBack(await written(description({ token_count: 0 }), { 'x.bin': Buffer.alloc(0) }));
  assert.deepEqual(none.manifest.tracks.map((t) => t.segments), [0, 0, 0, 0]);
});

test('tokens that do not fit become patches; constant channels and extreme values restore', async () => {
  const rows = new Float32Array(5 * 50 * 32).fill(3);
  rows.forEach((_, i) => { if (i % 32 === 1) rows[i] = i % 7; });
  rows[32 * 49 + 1] = 3e38; // the last token of the first layer
  rows[32 * 60] = 1e-45; // subnormal
  const x = Buffer.from(rows.buffer);
  const path = await written(description({ groups: [group({ dtype: 'float32' })] }), { 'x.bin': x });
  const back = await readBack(path);
  const at = 32 * 49 * 4;
  assert.deepEqual(back['near-lossless/zstd'].subarray(at, at + 128), x.subarray(at, at + 128));
  assert.deepEqual(back['exact/stored'], x);
  const { parts: [{ records: [{ record }] }] } = takeApart(path);
  assert.equal(setRecord(record, 0).layerCount, 3);
});

test('chain: salt, a later part, content', async () => {
  const ids = Array.from({ length: 700 }, (_, i) => i);
  const spans = [
    { count: 3, digest: `sha256:${'a'.repeat(64)}`, kind: 'image', start: 5 }, { count: 300, digest: `blake3:${'b'.repeat(64)}`, kind: 'audio', start: 300 },
    { count: 1, digest: null, kind: 'video', start: 650 },
  ];
  const identity = { ...unbound, kind: 'tokens' };
  const make = async (T, change) => (await readBack(await written(description({
    identity, token_ids: ids.slice(0, T), token_count: T, groups: [group({ layers: [0], heads: 1, head_dim: 1 })], tracks: ['exact/stored'], ...change,
  }), { 'x.bin': Buffer.alloc(2 * (T - (change?.first_position ?? 0))) }))).manifest.tokens;
  const plain = (await make(700)).chain;
  assert.equal(plain.hashes.length, 3);
  const later = await make(700, { first_position: 256, token_count: 444 });
  assert.deepEqual([later.chain.parent, ...later.chain.hashes], plain.hashes);
  assert.notDeepEqual((await make(700, { salt: '00' })).chain.hashes, plain.hashes);
  const content = await make(700, { content: spans });
  const plainly = (value) => JSON.parse(JSON.stringify(value)); // the reader's objects have no prototype
  assert.deepEqual(plainly(content.content), spans);
  assert.equal(content.chain.hashes.length, 2, 'up to the span without digest (TOK-5)');
  const links = new Chain(identity, Buffer.alloc(0));
  assert.deepEqual(content.chain.hashes, [links.add(ids, 0, 256, spans), links.add(ids, 256, 512, spans)]);
  const placed = ids.map((id, i) => (i >= 300 && i < 600 ? -1 - 2 ** 32 * i : id)); // ids inside a span are ignored
  assert.deepEqual((await make(700, { content: spans, token_ids: placed })).chain.hashes, content.chain.hashes);
  const rest = await make(700, { content: spans, first_position: 256, token_count: 444 });
  assert.deepEqual(plainly(rest.content), spans.slice(1));
});

test('lineage (LIN-1)', async () => {
  const lossy = { generations: 2, kind: 'lossy', profile: null, quality: 'small' };
  for (const [restored_from, expected] of [
    [{ lineage: { kind: 'exact' }, quality: 'high' }, { generations: 1, kind: 'lossy', profile: null, quality: 'high' }],
    [{ lineage: lossy, quality: 'high' }, { generations: 3, kind: 'lossy', profile: null, quality: 'high' }],
    [{ lineage: lossy, quality: 'exact' }, lossy], [{ lineage: { kind: 'exact' }, quality: 'exact' }, { kind: 'exact' }],
  ]) {
    const { manifest } = await readBack(await written(description({ restored_from, tracks: ['exact/zstd'] }), { 'x.bin': tensor('float16', 8000) }));
    assert.deepEqual({ ...manifest.lineage }, expected);
  }
});

test('refusals', async () => {
  const nan = tensor('float16', 8000);
  nan.writeUInt16LE(0x7e00, 15998);
  const tokens = { identity: { ...unbound, kind: 'tokens' } };
  for (const [code, change, bytes = tensor('float16', 8000)] of [
    ['input.non-finite', {}, nan], ['input.shape', {}, nan.subarray(1)], ['input.shape', { token_count: 51 }],
    ['input.dtype', { groups: [group({ dtype: 'int8' })] }], ['input.shape', { groups: [group({ heads: 0 })] }],
    ['input.shape', { groups: [group({ layers: [1, 0] })] }], ['input.shape', { groups: [] }], ['io.not-found', { groups: [group({ file: 'y' })] }],
    ['input.identity', tokens], ['input.identity', { ...tokens, token_ids: [1] }], ['input.identity', { token_ids: Array(50).fill(1) }],
    ['input.identity', { ...tokens, token_ids: Array(50).fill(2 ** 32 - 1) }], ['input.identity', { salt: '00' }],
    ['input.identity', { ...tokens, first_position: 1, token_ids: Array(51).fill(1) }], ['input.identity', { identity: {} }],
    ['input.identity', { first_position: 6, content: [{ count: 2, digest: null, kind: 'image', start: 5 }] }],
    ['input.shape', { groups: [group({ tokens: { kind: 'state', shape: [3] } })], valid_lengths: [50], tracks: ['exact/zstd'] }],
    ['input.range', { groups: [group({ head_dim: 65537 })] }], ['input.range', { first_position: 2 ** 40 }],
    ['usage.argument', { tracks: ['high/stored'] }], ['usage.argument', { tracks: [] }], ['usage.argument', { more: 1 }],
    ['usage.argument', { valid_lengths: [50] }], ['usage.argument', { groups: [group({ dtype: 'uint8' })] }],
  ]) {
    await assert.rejects(written(description(change), { 'x.bin': bytes }), { code }, `${code} ${JSON.stringify(change).slice(0, 60)}`);
  }
  const output = await written(description(), { 'x.bin': tensor('float16', 8000) });
  const before = readFileSync(output);
  const again = cli('encode', output.replace('out.kvf', 'spec.json'), '--output', output);
  assert.deepEqual([again.status, again.code], [74, 'io.exists']);
  assert.deepEqual(readFileSync(output), before);
  assert.equal(cli('encode', WORKED, '--output', `${output}2`).code, 'usage.argument');
  assert.deepEqual(cli('info').encode.toSorted(), ALL.toSorted());
});

test('interrupted, it leaves nothing behind (PUB-6)', async () => {
  const folder = join(temporary, 'interrupted');
  mkdirSync(folder);
  const groups = [group({ layers: Array.from({ length: 60 }, (_, i) => i), heads: 64, heads_total: 64 })];
  writeFileSync(join(folder, 'spec.json'), JSON.stringify(description({ groups, token_count: 500 })));
  writeFileSync(join(folder, 'x.bin'), tensor('float16', 60 * 500 * 512));
  const child = spawn(process.execPath, [here('kvf.mjs'), 'encode', join(folder, 'spec.json'), '--output', join(folder, 'out.kvf')]);
  const watcher = watch(folder);
  for await (const [, name] of on(watcher, 'change')) if (name.endsWith('.part')) break;
  watcher.close();
  child.kill('SIGTERM');
  const [, signal] = await once(child, 'close');
  assert.equal(signal, 'SIGTERM');
  assert.deepEqual(readdirSync(folder).toSorted(), ['spec.json', 'x.bin']);
});
