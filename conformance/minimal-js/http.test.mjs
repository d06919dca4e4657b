// SPDX-License-Identifier: Apache-2.0
// node --test: section 11.1 against a server that misbehaves in one way per path.
import assert from 'node:assert/strict';
import { readFileSync, rmSync } from 'node:fs';
import { createServer } from 'node:http';
import { createServer as createTcpServer } from 'node:net';
import { spawn } from 'node:child_process';
import { join } from 'node:path';
import { after, before, test } from 'node:test';
import { setTimeout as sleep } from 'node:timers/promises';
import { openArtifact } from './artifact.mjs';
import { hash, hex, integerSum } from './digest.mjs';
import { restoreTo, select } from './restore.mjs';
import { WORKED, here, putTogether, sources, takeApart, temporary } from './testing.mjs';
import { verify } from './verify.mjs';

const FIRST = 262_144;
const T = 100_000;
const large = largeArtifact(1);
const aligned = largeArtifact(4096);
const padded = largeArtifact(4096, 100); // more padding than data
const bigFront = putTogether((() => {
  const file = takeApart(WORKED);
  file.manifest.extensions.a = { must_understand: false, value: Array(70).fill('x'.repeat(4096)) };
  return file;
})());

/** One group [2, T, 1, 4] of float16 in the track exact/stored: segments of S tokens and 16 S bytes, 49 if S is 2,048. */
function largeArtifact(alignment, S = 2048) {
  const { manifest: m } = takeApart(WORKED);
  const source = Buffer.alloc(2 * T * 8);
  for (let i = 0; i < source.length / 2; i++) source.writeUInt16LE((i * 40503) & 0x7bff, 2 * i);
  const layer = (l) => source.subarray(l * T * 8, (l + 1) * T * 8);
  const records = [];
  for (let t = 0; t < T; t += S) {
    const record = Buffer.alloc(128);
    const object = Buffer.concat([0, 1].map((l) => layer(l).subarray(t * 8, (t + S) * 8)));
    record.writeUInt32LE(0xffffffff, 20);
    record.writeBigUInt64LE(BigInt(t), 24);
    record.writeUInt32LE(Math.min(S, T - t), 32);
    record.writeUInt16LE(2, 40);
    record.writeUInt16LE(0xffff, 42);
    record.writeUInt32LE(1, 48);
    record.writeBigUInt64LE(integerSum(object), 56);
    hash(object).copy(record, 64);
    hash(object).copy(record, 96);
    records.push({ record, object });
  }
  m.groups = [m.groups[0]];
  m.identity.kind = 'unbound';
  Object.assign(m.tokens, { chain: null, count: T });
  Object.assign(m.segmentation, { alignment, groups: [{ heads: 1, layers: 2 }], tokens: S });
  m.qualities = [{ ...m.qualities[1], encodings: ['exact'] }];
  m.tracks = [{ ...m.tracks[3], codecs: ['stored'], segments: records.length }];
  m.source_digest = hex(Buffer.concat([0, 1].map((l) => hash(layer(l)))));
  return putTogether({ manifest: m, parts: [{ part: m.qualities[0], records: [] }, { part: m.tracks[0], records }] });
}

const requests = []; // of the current test: {path, from, to, method, encoding}
let base;
let server;
before(() => new Promise((resolve) => {
  server = createServer((request, reply) => {
    const { pathname } = new URL(request.url, base);
    const [, name, rest] = pathname.split('/');
    const [from, to] = (/^bytes=(\d+)-(\d+)$/.exec(request.headers.range) ?? []).slice(1).map(Number);
    const { method, headers } = request;
    requests.push({ path: pathname, from, to, method, encoding: headers['accept-encoding'] });
    SERVE[name]({ request, reply, from, to, rest, turn: requests.filter((r) => r.path === pathname).length });
  });
  server.listen(0, '127.0.0.1', () => {
    base = `http://127.0.0.1:${server.address().port}`;
    resolve();
  });
}));
after(() => { server.closeAllConnections(); server.close(); });

/** What a good server sends, changed by `fields`; `cut` is the number of body bytes after which it breaks off. */
function send({ reply, from, to }, file, { total = file.length, fields = {}, cut } = {}) {
  if (from >= file.length) { reply.writeHead(416, { 'Content-Range': `bytes */${total}`, ...fields }).end(); return; }
  const body = file.subarray(from, to + 1);
  reply.writeHead(206, {
    'Content-Range': `bytes ${from}-${from + body.length - 1}/${total}`, 'Content-Length': body.length, ETag: '"1"', ...fields,
  });
  if (cut === undefined || cut >= body.length) reply.end(body);
  else reply.write(body.subarray(0, cut), () => reply.destroy());
}
const status = (code, fields) => ({ reply }) => reply.writeHead(code, fields).end('no range');
const later = (change) => (call) => send(call, large, call.from === 0 ? {} : change(call)); // only behind the first request
const tampered = (fields, change = (body) => body) => ({ reply, from, to }) => {
  const body = large.subarray(from, to + 1);
  reply.writeHead(206, from === 0 ? { 'Content-Range': `bytes 0-${body.length - 1}/${large.length}` } : fields(from, from + body.length - 1));
  reply.end(from === 0 ? body : change(body)); // chunked
};
const range = (from, to, total = large.length) => ({ 'Content-Range': `bytes ${from}-${to}/${total}` });

const SERVE = {
  good: (call) => send(call, large),
  small: (call) => send(call, sources.worked),
  aligned: (call) => send(call, aligned),
  padded: (call) => send(call, padded),
  front: (call) => send(call, bigFront),
  empty: (call) => send(call, Buffer.alloc(0)),
  star: (call) => send(call, large, { total: '*' }),
  'star-small': (call) => send(call, sources.worked, { total: '*' }),
  'star-longer': (call) => send(call, Buffer.concat([large, Buffer.alloc(1)]), { total: '*' }),
  'star-longer-small': (call) => send(call, Buffer.concat([sources.worked, Buffer.alloc(1)]), { total: '*' }),
  'star-short': (call) => send({ ...call, to: Math.min(call.to, 999) }, large, { total: '*' }),
  'star-in-header': (call) => send({ ...call, to: Math.min(call.to, 99) }, large, { total: '*' }),
  'size-late': (call) => send(call, large, { total: call.from === 0 ? '*' : large.length + 1 }),
  truncated: (call) => send(call, sources.worked.subarray(0, 1000)),
  whole: ({ reply }) => reply.writeHead(200).end(sources.worked),
  'whole-later': (call) => (call.from === 0 ? send(call, large) : call.reply.writeHead(200).end(large)),
  created: status(201),
  gzip: (call) => send(call, large, { fields: { 'Content-Encoding': 'gzip' } }),
  identity: (call) => send(call, large, { fields: { 'Content-Encoding': 'identity' } }),
  'no-range': ({ reply }) => reply.writeHead(206).end(sources.worked),
  multipart: ({ reply }) => reply.writeHead(206, { 'Content-Type': 'multipart/byteranges; boundary=x' }).end('--x'),
  malformed: later(() => ({ fields: { 'Content-Range': 'bytes 1-/9' } })),
  backwards: later(({ from }) => ({ fields: range(from, from - 1) })),
  beyond: later(({ from, to }) => ({ fields: range(from, to, to) })),
  shifted: later(({ from, to }) => ({ fields: range(from + 1, to + 1) })),
  unsatisfied: status(416, { 'Content-Range': `bytes */${large.length}` }),
  'unsatisfied-later': (call) => (call.from === 0 ? send(call, large) : status(416, { 'Content-Range': `bytes */${large.length}` })(call)),
  'first-ends-early': (call) => send({ ...call, to: call.from === 0 ? 9999 : call.to }, large),
  'ends-early': later(({ from, to }) => ({ fields: range(from, to - 1) })),
  'ends-late': tampered((from, to) => range(from, to + 1, '*'), (body) => Buffer.concat([body, Buffer.alloc(1)])),
  'body-short': tampered(range, (body) => body.subarray(0, body.length - 1)),
  'body-long': tampered(range, (body) => Buffer.concat([body, Buffer.alloc(1)])),
  'length-differs': later(({ from, to }) => ({ fields: { 'Content-Length': to - from + 2 } })),
  'other-size': later(() => ({ total: large.length + 1 })),
  'other-size-shifted': later(({ from, to }) => ({ fields: range(from + 1, to + 1, large.length + 1) })),
  'other-size-ends-early': later(({ from, to }) => ({ fields: range(from, to - 1, large.length + 1) })),
  'other-tag-gzip': later(() => ({ fields: { ETag: '"2"', 'Content-Encoding': 'gzip' } })),
  'other-tag-whole': (call) => (call.from === 0 ? send(call, large) : call.reply.writeHead(200, { ETag: '"2"' }).end(large)),
  'other-tag-416': (call) => (call.from === 0 ? send(call, large) : status(416, { ETag: '"2"' })(call)),
  'smaller-416': (call) => (call.from === 0 ? send(call, large) : status(416, { 'Content-Range': 'bytes */1000' })(call)),
  'other-tag': later(() => ({ fields: { ETag: '"2"' } })),
  'other-weak-tag': later(() => ({ fields: { ETag: 'W/"2"' } })),
  400: status(400), 401: status(401), 403: status(403), 404: status(404), 407: status(407), 410: status(410), 304: status(304),
  'always-503': status(503),
  'later-503': (call) => (call.turn % 2 ? status(503)(call) : send(call, large)),
  garbage: ({ request }) => request.socket.end('SMTP ready\r\n\r\n'),
  reset: ({ request }) => request.socket.destroy(),
  cut: (call) => send(call, large, call.turn === 2 ? { cut: 300_000 } : {}),
  'cut-first': (call) => send(call, large, call.turn === 1 ? { cut: 1000 } : {}),
  'always-cut': (call) => send(call, large, call.from === 0 ? {} : { cut: 1000 }),
  hop: (call) => (call.rest === '0' ? send(call, large) : status(302, { Location: `${call.rest - 1}?x=1` })(call)),
  'to-file': status(307, { Location: `file://${WORKED}` }),
  nowhere: status(308),
  'not-a-url': status(301, { Location: 'http://' }),
  silent: () => {},
  'silent-once': (call) => { if (call.turn > 1) send(call, large); },
  'stops-once': (call) => {
    if (call.turn !== 2) send(call, large);
    else call.reply.writeHead(206, range(call.from, call.to)).write(large.subarray(call.from, call.from + 300_000));
  },
  drips: async ({ reply, from, to }) => {
    const body = sources.worked.subarray(from, to + 1);
    reply.writeHead(206, range(from, from + body.length - 1, body.length));
    for (let at = 0; at < body.length; at += 500) {
      reply.write(body.subarray(at, at + 500));
      await sleep(150);
    }
    reply.end();
  },
  stops: ({ reply, from, to }) => {
    reply.writeHead(206, range(from, Math.min(to, large.length - 1)));
    reply.write(large.subarray(from, from + 1000));
  },
};

async function outcome(url, timeoutSeconds = 30) {
  requests.length = 0;
  let artifact;
  try {
    artifact = await openArtifact(url, timeoutSeconds);
    await verify(artifact);
    return 'ok';
  } catch (error) {
    if (error.verdict === undefined) throw error;
    return error.code;
  } finally {
    await artifact?.close();
  }
}

const table = (name, rows) => test(name, async () => {
  for (const [path, code] of Object.entries(rows)) assert.equal(await outcome(`${base}/${path}`), code, path);
});

table('good replies, with the total size and without (REQ-3)', {
  good: 'ok', small: 'ok', aligned: 'ok', front: 'ok', padded: 'ok', star: 'ok', 'star-small': 'ok', identity: 'ok', 'other-weak-tag': 'ok',
});
table('REQ-6: other than the range that was asked for', {
  whole: 'io.range', 'whole-later': 'io.range', created: 'io.range', gzip: 'io.range', 'no-range': 'io.range', multipart: 'io.range',
  malformed: 'io.range', backwards: 'io.range', beyond: 'io.range', shifted: 'io.range', unsatisfied: 'io.range',
  'unsatisfied-later': 'io.range', 'other-tag-416': 'io.range', empty: 'header.magic',
});
table('REQ-3, REQ-7: other lengths', {
  'first-ends-early': 'io.short', 'ends-early': 'io.short', 'ends-late': 'io.short', 'body-short': 'io.short', 'body-long': 'io.short',
  'length-differs': 'io.short', 'star-short': 'io.short', 'star-in-header': 'io.short',
});
table('REQ-8: another object in between', {
  'other-size': 'io.changed', 'other-size-shifted': 'io.changed', 'other-size-ends-early': 'io.changed',
  'other-tag-gzip': 'io.changed', 'other-tag-whole': 'io.changed', 'smaller-416': 'io.changed', 'other-tag': 'io.changed',
});
table('HDR-10: where the object ends', {
  truncated: 'file.size', 'star-longer': 'file.size', 'star-longer-small': 'file.size', 'size-late': 'file.size',
});
table('REQ-9: statuses', {
  404: 'io.not-found', 410: 'io.not-found', 401: 'io.denied', 403: 'io.denied', 407: 'io.denied', 400: 'io.read', 304: 'io.read',
  'always-503': 'io.read', 'later-503': 'ok', garbage: 'io.read', reset: 'io.read',
});
table('REQ-11: redirections', {
  'hop/10': 'ok', 'hop/11': 'io.read', 'to-file': 'io.read', nowhere: 'io.read', 'not-a-url': 'io.read',
});

test('no connection', async () => {
  const closed = createTcpServer();
  await new Promise((resolve) => closed.listen(0, '127.0.0.1', resolve));
  const { port } = closed.address();
  await new Promise((resolve) => closed.close(resolve));
  assert.equal(await outcome(`http://127.0.0.1:${port}/x`), 'io.read');
});

test('REQ-10: silence', async (t) => {
  assert.equal(await outcome(`${base}/silent`, 0.2), 'io.timeout');
  assert.equal(requests.length, 2, 'repeated once, then given up');
  assert.equal(await outcome(`${base}/stops`, 0.2), 'io.timeout');
  assert.equal(await outcome(`${base}/silent-once`, 1), 'ok');
  assert.equal(await outcome(`${base}/stops-once`, 1), 'ok');
  assert.equal(requests.length, 3);
  assert.ok(requests[2].from > requests[1].from && requests[2].to === requests[1].to, 'goes on behind the last whole object');
  assert.equal(await outcome(`${base}/drips`, 1), 'ok', 'every byte ends the silence');
  const tcp = createTcpServer(() => {});
  await new Promise((resolve) => tcp.listen(0, '127.0.0.1', resolve));
  t.after(() => tcp.close());
  assert.equal(await outcome(`https://127.0.0.1:${tcp.address().port}/x`, 0.2), 'io.timeout', 'no end of the handshake');
});

test('REQ-1, REQ-5, REQ-12: what is asked', async () => {
  for (const [path, file, count] of [['good', large, 2], ['small', sources.worked, 1], ['front', bigFront, 3], ['aligned', aligned, 2]]) {
    assert.equal(await outcome(`${base}/${path}`), 'ok');
    assert.ok(requests.every((r) => r.method === 'GET' && r.encoding === 'identity'));
    assert.deepEqual([requests[0].from, requests[0].to], [0, FIRST - 1]);
    assert.equal(requests.length, count, path);
    let at = FIRST;
    for (const { from, to } of requests.slice(1)) {
      assert.equal(from, at, 'each byte once');
      at = to + 1;
    }
    assert.ok(at === file.length || count === 1, 'and none behind the end');
  }
});

test('REQ-12: one byte behind the end, if no reply states the size', async () => {
  assert.equal(await outcome(`${base}/star`), 'ok');
  const behind = requests.filter((r) => r.to >= large.length);
  assert.deepEqual(behind.map((r) => [r.from, r.to]), [[large.length, large.length]]);
});

test('REQ-12: a part asks for its segments only', async () => {
  for (const [path, file, bytes] of [['good', large, 6 * 32_768], ['aligned', aligned, 6 * 32_768], ['padded', padded, 99 * 4096 + 1600]]) {
    requests.length = 0;
    const artifact = await openArtifact(`${base}/${path}`);
    const output = join(temporary, path);
    const track = artifact.manifest.tracks[0];
    await restoreTo(output, artifact, track, select(artifact.manifest, { tokens: [60_000, 70_000], layers: [1, 2], heads: null }));
    await artifact.close();
    const expected = Buffer.alloc(10_000 * 8);
    for (let i = 0; i < expected.length / 2; i++) expected.writeUInt16LE((((T + 60_000) * 4 + i) * 40503) & 0x7bff, 2 * i);
    assert.deepEqual(readFileSync(output), expected);
    rmSync(output);
    const { from, to } = requests[1];
    assert.equal(requests.length, 2, 'side by side in one request');
    assert.equal(to - from + 1, bytes);
    assert.ok(to < file.length);
  }
});

test('REQ-9: a broken body goes on behind the last object that came whole', async () => {
  assert.equal(await outcome(`${base}/cut`), 'ok');
  const [, broken, next] = requests;
  assert.equal(requests.length, 3);
  assert.equal(next.to, broken.to);
  const dataAt = large.length - 2 * T * 8;
  const came = broken.from + 300_000;
  assert.equal((next.from - dataAt) % 32_768, 0, 'at the start of a segment');
  assert.ok(next.from > broken.from && next.from <= came && came - next.from < 65_536, `${next.from} ${came}`);
  assert.equal(await outcome(`${base}/cut-first`), 'ok');
  assert.deepEqual(requests.slice(0, 2).map((r) => [r.from, r.to]), [[0, FIRST - 1], [0, FIRST - 1]]);
  assert.equal(await outcome(`${base}/always-cut`), 'io.short');
});

test('every request starts at the URL that was given', async () => {
  assert.equal(await outcome(`${base}/hop/2`), 'ok');
  assert.deepEqual(requests.map((r) => r.path), ['/hop/2', '/hop/1', '/hop/0', '/hop/2', '/hop/1', '/hop/0']);
});

test('command line: --timeout, and no secret of the URL in an answer', async () => {
  const cli = (...args) => new Promise((resolve) => {
    const child = spawn(process.execPath, [here('kvf.mjs'), ...args]);
    let out = '';
    child.stdout.on('data', (chunk) => { out += chunk; });
    child.on('close', (exit) => resolve({ exit, ...JSON.parse(out) }));
  });
  const late = await cli('inspect', `${base}/silent?signature=secret`, '--timeout', '0.2');
  assert.deepEqual([late.exit, late.code, late.where], [74, 'io.timeout', `${base}/silent`]);
  for (const bad of ['0', '-1', 'x', '1e9']) assert.equal((await cli('inspect', WORKED, `--timeout=${bad}`)).code, 'usage.argument', bad);
  assert.equal((await cli('verify', `${base}/good`, '--timeout', '20')).verdict, 'ok');
  assert.equal((await cli('info')).http, true);
});
