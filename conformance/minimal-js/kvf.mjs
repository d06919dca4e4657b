#!/usr/bin/env node
// SPDX-License-Identifier: Apache-2.0
// Commands info, inspect, verify, decode and encode. One JSON object on standard output, and its verdict as exit code.
// The command batch reads calls as lines and answers each with a line (section 4 of ../PROTOCOL.md).
import { readFileSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { endianness } from 'node:os';
import { createInterface } from 'node:readline';
import { parseArgs } from 'node:util';
import { openArtifact } from './artifact.mjs';
import { findIllegal, verifiedLength } from './chain.mjs';
import { available } from './codecs/hevc.mjs';
import { TRACKS } from './describe.mjs';
import { encode } from './encode.mjs';
import { EXIT, Failure, check } from './failure.mjs';
import { FEATURES, spans } from './manifest.mjs';
import { restoreTo, select } from './restore.mjs';
import { verify } from './verify.mjs';

const usage = (detail) => new Failure('usage.argument', 'arguments', detail);
const opening = { timeout: { type: 'string' } };
const expectations = {
  ...opening, 'expect-model': { type: 'string' }, 'expect-token-ids': { type: 'string' }, 'expect-content': { type: 'string' },
  'salt-file': { type: 'string' },
};
const BUG = 70;
const COMMANDS = {
  info: { options: {}, run: info },
  inspect: { options: opening, run: inspect },
  verify: { options: expectations, run: verifyAll },
  decode: {
    options: {
      ...expectations, track: { type: 'string' }, tokens: { type: 'string' }, layers: { type: 'string' },
      heads: { type: 'string' }, profile: { type: 'string' }, output: { type: 'string' },
    },
    run: decode,
  },
  encode: { options: { output: { type: 'string' } } },
};
const { version } = JSON.parse(readFileSync(new URL('package.json', import.meta.url)));

function info() {
  return {
    name: 'minimal-js', version, formats: ['0.9'], codecs: available() ? ['stored', 'zstd', 'hevc'] : ['stored', 'zstd'], features: FEATURES,
    levels: ['core', 'uncommon', 'faulty', 'hostile', 'future', 'gold'], batch: true, http: true, encode: TRACKS,
  };
}

async function inspect(artifact) {
  return { detail: unverified(artifact, null), manifest: artifact.manifest, manifest_digest: manifestDigest(artifact) };
}

async function verifyAll(artifact, options) {
  const length = await expected(artifact, options);
  // The whole artifact is asked about, as far as ids are given: one that differs is an answer, ids that lack are not.
  check(!length?.differs, 'identity.tokens', '/tokens/chain', `other tokens from ordinal ${length?.verified} on (TOK-11)`);
  const integers = await verify(artifact);
  const source = artifact.manifest.qualities.some((q) => q.name === 'exact') ? '' : 'source_digest, ';
  const fits = artifact.manifest.features.length > 0 ? 'whether a calibration profile fits (TRF-5), ' : '';
  const open = `not checked: ${source}${fits}the quality, references and bypass in HEVC (VER-5), whether the identity is true`;
  return { detail: `${open}; ${unverified(artifact, length)}`, integers, manifest_digest: manifestDigest(artifact) };
}

async function decode(artifact, options) {
  const { manifest: m } = artifact;
  const [tokens, layers, heads] = ['tokens', 'layers', 'heads'].map((key) => interval(options[key], key));
  if (options.track === undefined || options.output === undefined) throw usage('--track and --output are needed');
  const length = await expected(artifact, options);
  const track = m.tracks.find((t) => t.name === options.track);
  check(track, 'usage.selection', 'track', `no track ${options.track}; there are ${m.tracks.map((t) => t.name)}`);
  const parts = select(m, { tokens, layers, heads });
  const stop = tokens ? tokens[1] : m.tokens.count;
  check(length === null || stop <= length.verified, 'identity.tokens', '/tokens/chain',
    `tokens are verified up to ordinal ${length?.verified} only (TOK-11)`);
  const digests = await restoreTo(options.output, artifact, track, parts);
  return { detail: unverified(artifact, length), digests, manifest_digest: manifestDigest(artifact) };
}

async function write(spec, output) {
  if (output === undefined) throw usage('--output is needed');
  const { manifestDigest: digest } = await encode(spec, output, `kvformat-minimal-js ${version}`);
  return { where: output, detail: 'written', manifest_digest: digest };
}

const manifestDigest = (artifact) => artifact.header.manifestDigest.toString('hex');

/** What ENG-2 and VER-3 want said about the tokens. */
function unverified({ manifest: { identity, tokens } }, length) {
  if (identity.kind !== 'tokens') return `the tokens are not verified: the artifact is of kind ${identity.kind}`;
  return length ? `tokens are verified up to ordinal ${length.verified} of ${tokens.count}` : 'no token ids were given to compare';
}

/** Compare what the caller expects; returns the verified length, or null if no ids are given. */
async function expected({ manifest: m }, options) {
  const model = options['expect-model'];
  check(model === undefined || model === m.identity.model.id, 'identity.field', '/identity/model/id',
    `expected ${model}, found ${m.identity.model.id}`);
  const salt = options['salt-file'] === undefined ? Buffer.alloc(0) : await argumentFile(options['salt-file']);
  const content = await expectedContent(options['expect-content']);
  if (options['expect-token-ids'] === undefined) {
    if (options['salt-file'] !== undefined || content !== null) throw usage('--salt-file and --expect-content need --expect-token-ids');
    return null;
  }
  const ids = await argumentJson('expect-token-ids', options['expect-token-ids']);
  if (!Array.isArray(ids) || findIllegal(ids, content ?? []) >= 0) {
    throw usage('--expect-token-ids: expected a JSON list of integers, from 0 to 2^32 - 2 outside content spans');
  }
  return verifiedLength(m, ids, content, salt);
}

async function expectedContent(path) {
  if (path === undefined) return null;
  const given = await argumentJson('expect-content', path);
  try {
    spans(given, '');
  } catch (error) {
    throw usage(`--expect-content: ${error.where} ${error.message}`);
  }
  const ascending = given.every(({ start }, i) => i === 0 || given[i - 1].start + given[i - 1].count <= start);
  if (!ascending) throw usage('--expect-content: spans must ascend and be disjoint (TOK-8)');
  return given;
}

async function argumentJson(name, path) {
  const text = await argumentFile(path);
  try {
    return JSON.parse(text);
  } catch (error) {
    throw usage(`--${name}: ${error.message}`);
  }
}

async function argumentFile(path) {
  return readFile(path).catch((error) => { throw usage(error.message); });
}

function interval(text, key) {
  if (text === undefined) return null;
  const match = /^(\d{1,15}):(\d{1,15})$/.exec(text);
  if (!match || Number(match[1]) >= Number(match[2])) throw usage(`--${key}: expected A:B with A below B, found ${text}`);
  return [Number(match[1]), Number(match[2])];
}

function seconds(text) {
  if (text === undefined) return undefined;
  if (!/^\d{1,6}(\.\d{1,3})?$/.test(text) || Number(text) === 0) throw usage(`--timeout: expected seconds above 0, found ${text}`);
  return Number(text);
}

async function run(argv) {
  const [name, ...rest] = argv;
  if (!Object.hasOwn(COMMANDS, name ?? '')) throw usage(`expected one of ${Object.keys(COMMANDS)}, batch`);
  const command = COMMANDS[name];
  let parsed;
  try {
    parsed = parseArgs({ args: rest, options: command.options, allowPositionals: true });
  } catch (error) {
    throw usage(error.message);
  }
  if (parsed.positionals.length !== (name === 'info' ? 0 : 1)) throw usage('expected one URL, and none for info');
  if (name === 'info') return info();
  if (name === 'encode') return write(parsed.positionals[0], parsed.values.output);
  const artifact = await openArtifact(parsed.positionals[0], seconds(parsed.values.timeout), parsed.values.profile);
  try {
    return { where: parsed.positionals[0], ...await command.run(artifact, parsed.values) };
  } finally {
    await artifact.close();
  }
}

/** The answer of one call. Errors that are no Failure are bugs and go on to the end of this file. */
async function answer(call) {
  try {
    return { protocol: 1, verdict: 'ok', code: null, ...await call() };
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    const { verdict, code, where, message } = error;
    return { protocol: 1, verdict, code, where, detail: message };
  }
}

/** Write a line and wait until it is written. */
const print = (value) => new Promise((done) => { process.stdout.write(`${JSON.stringify(value)}\n`, done); });

function lineArguments(line) {
  try {
    const argv = JSON.parse(line);
    if (Array.isArray(argv) && argv.every((item) => typeof item === 'string')) return argv;
  } catch {
    // answered below
  }
  throw usage('expected a JSON list of strings');
}

async function batch() {
  for await (const line of createInterface({ input: process.stdin })) {
    const answered = await answer(() => run(lineArguments(line)));
    await print({ ...answered, exit: EXIT[answered.verdict] });
  }
  return 0;
}

async function single(argv) {
  const answered = await answer(() => run(argv));
  await print(answered);
  return EXIT[answered.verdict];
}

try {
  if (endianness() !== 'LE') throw new Error('this reader uses typed arrays as little-endian numbers');
  const argv = process.argv.slice(2);
  // Exit at once: idle connections would keep the process for seconds.
  process.exit(argv.length === 1 && argv[0] === 'batch' ? await batch() : await single(argv));
} catch (error) {
  console.error(error);
  process.exit(BUG);
}
