// SPDX-License-Identifier: Apache-2.0
// Ranges of an object behind HTTP or HTTPS: REQ-5 to REQ-11. A reply is checked before its body is read, and the body
// while it comes.
import http from 'node:http';
import https from 'node:https';
import { setTimeout as sleep } from 'node:timers/promises';
import { Failure, check } from './failure.mjs';

const REDIRECTIONS = 10;
const REPEATS = 4; // in a row that bring no further object
const FIRST_DELAY_MS = 200; // doubles each time
const REDIRECTS = [301, 302, 303, 307, 308];
const TRANSIENT_STATUS = [408, 425, 429, 500, 502, 503, 504];
const TRANSIENT_ERRORS = ['ECONNREFUSED', 'ECONNRESET', 'ECONNABORTED', 'EPIPE', 'EHOSTUNREACH', 'ENETUNREACH', 'EAI_AGAIN'];

const transient = (failure) => Object.assign(failure, { transient: true });

export class HttpObject {
  #url;
  #where;
  #timeoutSeconds;
  #tag = null; // the first strong entity tag that a reply states
  #agents = { 'http:': new http.Agent({ keepAlive: true }), 'https:': new https.Agent({ keepAlive: true }) };
  size = null; // the first total size that a reply states

  constructor(url, timeoutSeconds) {
    if (!URL.canParse(url)) throw new Failure('usage.argument', url, 'not a URL');
    this.#url = new URL(url);
    this.#where = this.#url.origin + this.#url.pathname; // the rest may hold a password or a signature
    this.#timeoutSeconds = timeoutSeconds;
  }

  /** The first bytes, at most `length`: fewer if the object ends before (REQ-3), none if it is empty (REQ-6). */
  async open(length) {
    const out = Buffer.allocUnsafe(length);
    const body = { have: 0 };
    await this.#repeating(async () => {
      body.have = 0;
      await this.#receive(0, out, body, true);
    });
    return out.subarray(0, body.have);
  }

  /** Bytes from `offset` to the last of `stops`, the ends of the objects that are asked for. */
  async fetch(offset, stops) {
    const out = Buffer.allocUnsafe(stops.at(-1) - offset);
    let whole = 0; // length of the objects that came whole
    await this.#repeating(async () => {
      const body = { have: 0 };
      const before = whole;
      try {
        await this.#receive(offset + before, out.subarray(before), body, false);
      } catch (error) {
        for (const stop of stops) if (stop - offset <= before + body.have) whole = stop - offset;
        error.progress = whole > before;
        throw error;
      }
    });
    return out;
  }

  /** Does the object end at `offset`? One byte is asked for if no reply has said so (REQ-12). */
  async endsAt(offset) {
    if (this.size === null) {
      const ends = await this.#repeating(async () => {
        const reply = await this.#ask(offset, 1);
        reply.destroy();
        if (reply.statusCode !== 416) return this.#check(reply, offset, 1, false) === 0;
        this.#same('size', contentRange(reply.headers['content-range'])?.total ?? null);
        return true; // for every other request status 416 is a failure
      });
      if (this.size === null) return ends;
    }
    return this.size === offset;
  }

  async close() {
    for (const agent of Object.values(this.#agents)) agent.destroy();
  }

  async #repeating(attempt) {
    for (let failed = 0, silent = false; ;) {
      try {
        return await attempt();
      } catch (error) {
        if (error.code === 'io.timeout') {
          if (silent) throw error;
          silent = true; // REQ-10: once
          continue;
        }
        if (error.progress) failed = 0;
        if (!error.transient || failed === REPEATS) throw error;
        await sleep(FIRST_DELAY_MS * 2 ** failed * (0.5 + Math.random() / 2));
        failed++;
      }
    }
  }

  /** One request for as many bytes as `out` holds; `body.have` counts those that came. */
  async #receive(offset, out, body, first) {
    const reply = await this.#ask(offset, out.length);
    try {
      const expected = this.#check(reply, offset, out.length, first);
      for await (const chunk of reply) {
        check(chunk.length <= expected - body.have, 'io.short', this.#where, `more than ${expected} bytes from ${offset}`);
        out.set(chunk, body.have);
        body.have += chunk.length;
      }
      check(body.have === expected, 'io.short', this.#where, `${body.have} of ${expected} bytes from ${offset}`);
    } catch (error) {
      if (error instanceof Failure) throw error;
      throw transient(new Failure('io.short', this.#where, `${body.have} bytes from ${offset}, then ${error.message}`));
    } finally {
      if (!reply.readableEnded) reply.destroy();
    }
  }

  /** The reply to a request for a range, behind all redirections. */
  async #ask(offset, length) {
    let url = this.#url;
    for (let hops = 0; ; hops++) {
      const reply = await this.#get(url, `bytes=${offset}-${offset + length - 1}`);
      if (!REDIRECTS.includes(reply.statusCode)) return reply;
      reply.destroy();
      const { location } = reply.headers;
      const refuse = (why) => new Failure('io.read', this.#where, `status ${reply.statusCode}, ${why}`);
      if (hops === REDIRECTIONS) throw refuse(`after ${REDIRECTIONS} redirections`);
      if (location === undefined || !URL.canParse(location, url)) throw refuse(`to ${location}`);
      const target = new URL(location, url);
      if (!Object.hasOwn(this.#agents, target.protocol)) throw refuse(`to ${target.protocol} (REQ-11)`);
      url = target;
    }
  }

  #get(url, range) {
    return new Promise((resolve, reject) => {
      const request = (url.protocol === 'https:' ? https : http).get(url, {
        agent: this.#agents[url.protocol],
        headers: { Range: range, 'Accept-Encoding': 'identity' },
        timeout: this.#timeoutSeconds * 1000, // without any byte, from the attempt to connect on
      });
      let reply = null;
      request.on('response', (message) => {
        reply = message;
        resolve(message);
      });
      const silent = () => new Failure('io.timeout', this.#where, `nothing came for ${this.#timeoutSeconds} s`);
      request.on('timeout', () => (reply ?? request).destroy(silent()));
      request.on('error', (error) => {
        if (error instanceof Failure) { reject(error); return; }
        if (error.code === 'ETIMEDOUT') { reject(silent()); return; }
        const failure = new Failure('io.read', this.#where, error.message || error.code);
        reject(TRANSIENT_ERRORS.includes(error.code) ? transient(failure) : failure);
      });
    });
  }

  /** Check status and fields of a reply; returns how many bytes its body must have. */
  #check(reply, offset, length, first) {
    const { statusCode: status, headers } = reply;
    const failure = (code, detail) => new Failure(code, this.#where, detail);
    const must = (condition, code, detail) => { if (!condition) throw failure(code, detail); };
    if (TRANSIENT_STATUS.includes(status)) throw transient(failure('io.read', `status ${status}`));
    must(status !== 404 && status !== 410, 'io.not-found', `status ${status}`);
    must(![401, 403, 407].includes(status), 'io.denied', `status ${status}`);
    must(status === 416 || (status >= 200 && status < 300), 'io.read', `status ${status}`);
    const range = contentRange(headers['content-range']);
    this.#same('size', range?.total ?? null);
    if (status === 416) {
      if (first && range?.total === 0) return 0;
      throw failure('io.range', `status 416 for ${length} bytes from ${offset}`);
    }
    this.#same('tag', strongTag(headers.etag)); // the tag of a reply with status 416 may be that of its error page
    must(status === 206, 'io.range', `expected status 206, found ${status}: the range is ignored`);
    const encoding = headers['content-encoding'] ?? 'identity';
    must(encoding.toLowerCase() === 'identity', 'io.range', `content encoding ${encoding}`);
    must(range && range.first !== null, 'io.range', `Content-Range: ${headers['content-range']}`);
    must(range.first === offset, 'io.range', `asked for offset ${offset}, found ${range.first}`);
    const bytes = range.last - range.first + 1;
    const expected = first ? Math.min(length, range.total ?? bytes) : length; // "*": the header will tell, see Source
    must(bytes === expected, 'io.short', `asked for ${length} bytes from ${offset}, found ${bytes}`);
    must((headers['content-length'] ?? String(bytes)) === String(bytes), 'io.short',
      `${bytes} bytes by Content-Range, ${headers['content-length']} by Content-Length`);
    return bytes;
  }

  /** REQ-8. What a reply does not state, it does not change. */
  #same(what, stated) {
    if (stated === null) return;
    const known = what === 'size' ? (this.size ??= stated) : (this.#tag ??= stated);
    check(known === stated, 'io.changed', this.#where, `another ${what}: first ${known}, then ${stated}`);
  }
}

/** {first, last, total}: first and last are null for "*", as in status 416, and so is total; null if malformed. */
function contentRange(field) {
  const match = /^bytes +(?:(\d+)-(\d+)|\*)\/(\d+|\*)$/i.exec(field ?? '');
  if (!match) return null;
  const number = (text) => (text === undefined || text === '*' ? null : Number(text));
  const [first, last, total] = match.slice(1).map(number);
  const fits = [first, last, total].every((n) => n === null || Number.isSafeInteger(n));
  return fits && (first === null ? total !== null : first <= last && (total === null || last < total)) ? { first, last, total } : null;
}

const strongTag = (field) => (field !== undefined && field.startsWith('"') ? field : null);
