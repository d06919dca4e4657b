// SPDX-License-Identifier: Apache-2.0
// Bytes of an artifact by range: a local file, or HTTP with exact checks of each reply (section 11.1).
import { open, stat } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';
import { Failure, check } from './failure.mjs';

const FIRST = 262_144;
const PREFETCH = 64 * 2 ** 20;
const TIMEOUT_MS = 60_000;

export async function openSource(url) {
  const source = /^https?:\/\//i.test(url) ? new Http(url) : new Local(/^file:/i.test(url) ? localPath(url) : url);
  await source.start();
  return source;
}

function localPath(url) {
  try {
    return fileURLToPath(url);
  } catch (error) {
    throw new Failure('usage.argument', url, error.message);
  }
}

class Source {
  head = Buffer.alloc(0); // bytes from offset 0 that are already here (REQ-1)
  size = null; // of the whole artifact, where known

  /** Fetch the front up to `end` in one more request, or the first part of a very large one. */
  async prefetch(end) {
    const stop = Math.min(end, PREFETCH);
    if (stop > this.head.length) this.head = await this.read(0, stop);
  }

  /** Exactly these bytes. The caller has checked `length` against the limits (ORD-4). */
  async read(offset, length) {
    const stop = offset + length;
    if (stop <= this.head.length) return this.head.subarray(offset, stop);
    if (offset >= this.head.length) return this.fetch(offset, length);
    const rest = await this.fetch(this.head.length, stop - this.head.length);
    return Buffer.concat([this.head.subarray(offset), rest]);
  }

  async close() {}
}

class Local extends Source {
  constructor(path) {
    super();
    this.path = path;
  }

  async start() {
    try {
      check((await stat(this.path)).isFile(), 'io.read', this.path, 'not a regular file'); // to open a pipe would wait
      this.file = await open(this.path, 'r');
      this.size = (await this.file.stat()).size;
    } catch (error) {
      if (error instanceof Failure) throw error;
      throw new Failure(error.code === 'ENOENT' ? 'io.not-found' : 'io.read', this.path, error.message);
    }
    this.head = await this.fetch(0, Math.min(FIRST, this.size));
  }

  async fetch(offset, length) {
    const out = Buffer.allocUnsafe(length);
    for (let have = 0; have < length;) {
      const { bytesRead } = await this.file.read(out, have, length - have, offset + have).catch((error) => {
        throw new Failure('io.read', this.path, error.message);
      });
      check(bytesRead > 0, 'io.short', this.path, `${have} of ${length} bytes from offset ${offset}`);
      have += bytesRead;
    }
    return out;
  }

  close() {
    return this.file?.close();
  }
}

class Http extends Source {
  constructor(url) {
    super();
    this.url = url;
  }

  async start() {
    this.head = await this.fetch(0, FIRST, true);
  }

  async fetch(offset, length, first = false) {
    if (length === 0) return Buffer.alloc(0);
    try {
      return await this.#request(offset, length, first);
    } catch (error) {
      if (error instanceof Failure) throw error;
      throw new Failure('io.read', this.url, `${error.message}: ${error.cause?.message ?? ''}`);
    }
  }

  async #request(offset, length, first) {
    const reply = await fetch(this.url, {
      // With Range, fetch adds "Accept-Encoding: identity" by itself; giving it here as well would double it.
      headers: { Range: `bytes=${offset}-${offset + length - 1}` },
      signal: AbortSignal.timeout(TIMEOUT_MS),
    });
    try {
      check(reply.status !== 404 && reply.status !== 410, 'io.not-found', this.url, `status ${reply.status}`);
      const range = /^bytes (?:(\d+)-(\d+)|\*)\/(\d+|\*)$/.exec(reply.headers.get('content-range') ?? '');
      const total = range && range[3] !== '*' ? Number(range[3]) : null;
      if (first && reply.status === 416 && total === 0) {
        this.size = 0; // an empty object has no first byte to give
        return Buffer.alloc(0);
      }
      check(reply.status === 206, 'io.read', this.url, `expected status 206, found ${reply.status}`);
      const encoding = reply.headers.get('content-encoding') ?? 'identity';
      check(encoding === 'identity', 'io.read', this.url, `content encoding ${encoding}`);
      check(range?.[1] !== undefined && Number(range[1]) === offset, 'io.read', this.url,
        `asked for offset ${offset}, found Content-Range ${reply.headers.get('content-range')}`);
      if (first) this.size = total;
      check(total === this.size, 'io.read', this.url, `the size changed from ${this.size} to ${total}`);
      const got = Number(range[2]) - offset + 1;
      // The first reply may be short, but only because the artifact ends there; a size of * is settled by file_bytes.
      const expected = first ? Math.min(length, total ?? got) : length;
      check(got === expected && got <= length, 'io.short', this.url, `asked for ${length} bytes from ${offset}, found ${got}`);
      const out = Buffer.allocUnsafe(got);
      let have = 0;
      for await (const chunk of reply.body) {
        check(chunk.length <= got - have, 'io.short', this.url, `more than ${got} bytes from ${offset}`);
        out.set(chunk, have);
        have += chunk.length;
      }
      check(have === got, 'io.short', this.url, `${have} of ${got} bytes from ${offset}`);
      return out;
    } finally {
      if (!reply.body?.locked) await reply.body?.cancel().catch(() => {});
    }
  }
}
