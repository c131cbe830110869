/**
 * The texts for translators: the catalogue in locale/ is up to date, and nothing on the screen bypasses
 * the translator. `npm run catalogue` writes the catalogue anew.
 */

import { readFileSync, readdirSync } from 'node:fs';

import type { TranslationBundle } from '@jupyterlab/translation';
import { NullTranslator, nullTranslator } from '@jupyterlab/translation';
import { cleanup, render } from '@testing-library/react';
import * as React from 'react';
import ts from 'typescript';
import { afterEach, describe, expect, it } from 'vitest';

import { statusOf } from '../src/model/status';
import { DOMAIN, setTranslator } from '../src/model/translation';
import { KiwiPanel } from '../src/panel/index';
import { STORIES } from '../stories/states';
import { NO_ACTIONS, StillStore } from '../stories/store';

interface IMessage {
  readonly context: string;
  readonly id: string;
  readonly plural: string;
  readonly file: string;
}

/** The number of literals with which each method begins. */
const LITERALS: Readonly<Record<string, number>> = { __: 1, _n: 2, _p: 2 };

const SOURCES = readdirSync('src', { recursive: true, encoding: 'utf-8' })
  .filter(name => /\.tsx?$/.test(name))
  .sort()
  .map(name =>
    ts.createSourceFile(
      `src/${name}`,
      readFileSync(`src/${name}`, 'utf-8'),
      ts.ScriptTarget.ES2022,
      true
    )
  );

function where(node: ts.Node): string {
  const file = node.getSourceFile();
  return `${file.fileName}:${file.getLineAndCharacterOfPosition(node.getStart()).line + 1}`;
}

/** Returns the method if `node` calls the translator. */
function methodOf(node: ts.Node): string | undefined {
  if (!ts.isCallExpression(node) || !ts.isPropertyAccessExpression(node.expression)) {
    return undefined;
  }
  const { expression, name } = node.expression;
  return expression.getText() === 'trans' ? name.text : undefined;
}

function messageOf(call: ts.CallExpression, method: string): IMessage {
  const count = LITERALS[method];
  const literals = call.arguments.slice(0, count).filter(ts.isStringLiteralLike);
  if (count === undefined || literals.length !== count) {
    throw new Error(`${where(call)}: trans.${method} takes its texts as literals.`);
  }
  const texts = literals.map(each => each.text);
  const [context, id, plural] =
    method === '_p' ? [texts[0], texts[1], ''] : ['', texts[0], texts[1] ?? ''];
  // %1 of _n is its number.
  const values = call.arguments.length - count + (method === '_n' ? 0 : 1);
  const most = Math.max(
    0,
    ...[...`${id} ${plural}`.matchAll(/%(\d)/g)].map(found => Number(found[1]))
  );
  if (most + 1 !== values && !(method === '_n' && most + 1 === values + 1)) {
    throw new Error(`${where(call)}: ${most} placeholders, ${values - 1} values.`);
  }
  return { context: context ?? '', id: id ?? '', plural, file: call.getSourceFile().fileName };
}

function fromSources(): IMessage[] {
  const found: IMessage[] = [];
  const walk = (node: ts.Node) => {
    const method = methodOf(node);
    if (method !== undefined) {
      found.push(messageOf(node as ts.CallExpression, method));
    }
    ts.forEachChild(node, walk);
  };
  SOURCES.forEach(walk);
  return found;
}

/** The texts of the settings, which the Jupyter server translates. */
function fromSchema(): IMessage[] {
  const file = 'schema/plugin.json';
  const schema = JSON.parse(readFileSync(file, 'utf-8')) as ISchema;
  const text = (context: string, id: string) => ({ context, id, plural: '', file });
  return [
    text('schema', schema.title),
    text('schema', schema.description),
    text('settings', schema['jupyter.lab.setting-icon-label']),
    ...Object.values(schema.properties).flatMap(({ title, description }) => [
      text('settings', title),
      text('settings', description)
    ])
  ];
}

interface ISchema {
  readonly title: string;
  readonly description: string;
  readonly 'jupyter.lab.setting-icon-label': string;
  readonly properties: Readonly<Record<string, { title: string; description: string }>>;
}

/** Returns gettext's template. It names files, but no lines: those change with every edit. */
function template(messages: readonly IMessage[]): string {
  const entries = new Map<string, { message: IMessage; files: Set<string> }>();
  for (const message of messages) {
    const key = JSON.stringify([message.context, message.id]);
    const entry = entries.get(key) ?? { message, files: new Set() };
    entries.set(key, entry);
    entry.files.add(message.file);
    if (entry.message.plural !== message.plural) {
      throw new Error(`${message.file}: one text, two plurals: ${message.id}`);
    }
  }
  const blocks = [...entries.values()].map(({ message: { context, id, plural }, files }) => [
    ...[...files].sort().map(file => `#: ${file}`),
    ...(context === '' ? [] : [`msgctxt ${JSON.stringify(context)}`]),
    `msgid ${JSON.stringify(id)}`,
    ...(plural === ''
      ? ['msgstr ""']
      : [`msgid_plural ${JSON.stringify(plural)}`, 'msgstr[0] ""', 'msgstr[1] ""'])
  ]);
  const head = [
    '# The texts of Kiwi in JupyterLab. Written by: make catalogue',
    'msgid ""',
    'msgstr ""',
    '"Content-Type: text/plain; charset=UTF-8\\n"',
    '"Plural-Forms: nplurals=2; plural=(n != 1);\\n"'
  ];
  return [head, ...blocks].map(lines => `${lines.join('\n')}\n`).join('\n');
}

describe('the catalogue', () => {
  it('has every text of the sources and of the settings', async () => {
    const written = template([...fromSources(), ...fromSchema()]);
    await expect(written).toMatchFileSnapshot(`../locale/${DOMAIN}.pot`);
  });
});

/** Literals that are no texts of the screen, by the property, attribute or call that takes them. */
const NO_TEXTS = new Set(['className', 'd', 'id', 'description', 'viewBox', 'points', 'type']);
const NO_TEXT_CALLS = new Set(['Token', 'warn', 'addClass', 'querySelectorAll']);

function takes(node: ts.Node): string {
  const { parent } = node;
  if (ts.isPropertyAssignment(parent) || ts.isJsxAttribute(parent)) {
    return parent.name.getText();
  }
  if (ts.isCallExpression(parent) || ts.isNewExpression(parent)) {
    return parent.expression.getText().replace(/^.*\./, '');
  }
  return ts.isBinaryExpression(parent) ? parent.left.getText().replace(/^.*\./, '') : '';
}

/** Returns the places with literals that read like a text: in JSX anything with letters, elsewhere two
 * words or a capital. Single small words may be codes: the next test finds them on the screen. */
function bypasses(file: ts.SourceFile): string[] {
  const found: string[] = [];
  const walk = (node: ts.Node) => {
    if (
      ts.isImportDeclaration(node) ||
      ts.isExportDeclaration(node) ||
      ts.isLiteralTypeNode(node)
    ) {
      return;
    }
    const method = methodOf(node);
    if (method !== undefined) {
      (node as ts.CallExpression).arguments.slice(LITERALS[method]).forEach(walk);
      return;
    }
    const jsx = ts.isJsxText(node);
    const literal = ts.isStringLiteralLike(node) || ts.isTemplateLiteralToken(node);
    if (jsx || literal) {
      const name = takes(ts.isTemplateLiteralToken(node) ? attributeOf(node) : node);
      const reads =
        jsx || isShown(node)
          ? /\p{L}/u
          : /\p{L}{2,}[,;:.]? \p{L}+(?![\w=-]*[-=])|^ ?\p{Lu}\p{Ll}+[ .:,]?(?!\w)/u;
      if (reads.test(node.text) && !NO_TEXTS.has(name) && !NO_TEXT_CALLS.has(name)) {
        found.push(`${where(node)}: ${node.text.trim()}`);
      }
    }
    ts.forEachChild(node, walk);
  };
  walk(file);
  return found;
}

const SHOWN_ATTRIBUTES = new Set(['title', 'aria-label', 'label', 'placeholder', 'alt']);

/** Returns whether `node` is what stands in an element, or in an attribute that people read. */
function isShown(node: ts.Node): boolean {
  let at = node;
  while (
    ts.isConditionalExpression(at.parent) ||
    ts.isParenthesizedExpression(at.parent) ||
    ts.isTemplateSpan(at.parent) ||
    ts.isTemplateExpression(at.parent) ||
    (ts.isBinaryExpression(at.parent) && at.parent.right === at)
  ) {
    at = at.parent;
  }
  const place = ts.isJsxExpression(at.parent) ? at.parent.parent : at.parent;
  return ts.isJsxAttribute(place)
    ? SHOWN_ATTRIBUTES.has(place.name.getText())
    : ts.isJsxExpression(at.parent);
}

/** Returns the outermost expression of which a piece of a template is a part. */
function attributeOf(node: ts.Node): ts.Node {
  let at = node;
  while (
    ts.isTemplateSpan(at.parent) ||
    ts.isTemplateExpression(at.parent) ||
    ts.isJsxExpression(at.parent)
  ) {
    at = at.parent;
  }
  return at;
}

/** A name, units, what the daemon calls other users, and a media query. */
const MEANT = ['Kiwi', 's', 'min', 'another user', '(prefers-reduced-motion: reduce)'];

describe('no text bypasses the translator', () => {
  it('in the sources', () => {
    const found = SOURCES.flatMap(bypasses).filter(
      each => !MEANT.some(text => each.endsWith(`: ${text}`))
    );
    expect(found).toEqual([]);
  });

  afterEach(() => {
    cleanup();
    setTranslator(nullTranslator);
  });

  it.each(Object.entries(STORIES))('on the screen: %s', (_, story) => {
    setTranslator(new NullTranslator(marking));
    const { state, connection, currentKernel = null, zoom_s } = story;
    const store = new StillStore(state, connection, currentKernel);
    const { container } = render(<KiwiPanel store={store} actions={NO_ACTIONS} zoom_s={zoom_s} />);
    const status = statusOf(store);
    const texts = [...textsIn(container), status?.text ?? '', status?.label ?? ''];
    const given = stringsIn(state).sort((a, b) => b.length - a.length);
    const bare = texts.map(text => withoutMarked(text, given)).filter(text => WORD.test(text));
    expect([...new Set(bare)]).toEqual([]);
  });
});

const bundle = nullTranslator.load(DOMAIN);
const marked = (text: string) => `⟦${text}⟧`;

/** Marks what it has translated. */
const marking: TranslationBundle = {
  ...bundle,
  __: (...given: Parameters<TranslationBundle['__']>) => marked(bundle.__(...given)),
  _n: (...given: Parameters<TranslationBundle['_n']>) => marked(bundle._n(...given)),
  _p: (...given: Parameters<TranslationBundle['_p']>) => marked(bundle._p(...given))
};

/** A word, except for units. */
const WORD = /(?<![\p{L}/])(?!(?:s|min|h|B|[KMGT]iB|GB|W|C)(?!\p{L}))\p{L}+/u;

const BLOCKS = 'p, li, div, section, h2, h3, h4, button, summary, label, option, text, title';

/** Returns the texts of blocks, tooltips and labels. A long name stands there twice, once in two parts:
 * that one is left out. */
function textsIn(root: Element): string[] {
  const blocks = new Map<Element | null, string>();
  const labels: string[] = [];
  for (const element of root.querySelectorAll('*:not(.jp-Kiwi-cut, .jp-Kiwi-cut *)')) {
    const block = element.closest(BLOCKS);
    for (const child of element.childNodes) {
      if (child.nodeType === Node.TEXT_NODE) {
        blocks.set(block, (blocks.get(block) ?? '') + (child.textContent ?? ''));
      }
    }
    labels.push(...['title', 'aria-label'].map(name => element.getAttribute(name) ?? ''));
  }
  return [...blocks.values(), ...labels];
}

/** Returns all strings of the state: names, and sentences in the daemon's words. */
function stringsIn(value: unknown): string[] {
  if (typeof value === 'string') {
    return value === ''
      ? []
      : [value, ...value.split('`'), value.charAt(0).toUpperCase() + value.slice(1)];
  }
  return typeof value === 'object' && value !== null ? Object.values(value).flatMap(stringsIn) : [];
}

function withoutMarked(text: string, given: readonly string[]): string {
  let [before, rest] = ['', text];
  while (before !== rest) {
    [before, rest] = [rest, rest.replace(/⟦[^⟦⟧]*⟧/g, '')];
  }
  return given.reduce((left, each) => (each.length > 2 ? left.replaceAll(each, '') : left), rest);
}
