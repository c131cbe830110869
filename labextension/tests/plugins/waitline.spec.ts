import type { KernelMessage } from '@jupyterlab/services';
import { describe, expect, it, vi } from 'vitest';

import type { ICell } from '../../src/plugins/waitline';
import { WaitLines, readWait } from '../../src/plugins/waitline';

function update(commId: string, cell: unknown, html: string) {
  return {
    header: { msg_type: 'comm_msg' },
    content: { comm_id: commId, data: { cell, text: 'Waiting', html } }
  } as unknown as KernelMessage.IMessage;
}

/** Renders like JupyterLab's renderer of trusted HTML. */
function cell(id: string, executionState = 'idle', widgets: readonly string[] = []): ICell {
  const wrapper = document.createElement('div');
  const area = document.createElement('div');
  const node = document.createElement('div');
  wrapper.append(area);
  node.append(wrapper);
  const createRenderer = () => {
    const drawn = document.createElement('div');
    const renderModel = (model: unknown) => {
      drawn.innerHTML = (model as { data: Record<string, string> }).data['text/html'] ?? '';
      return Promise.resolve();
    };
    return { node: drawn, renderModel, dispose: () => undefined };
  };
  const rendermime = { createRenderer, createModel: (options: unknown) => options };
  const outputs = widgets.map(model_id => ({
    data: { 'application/vnd.jupyter.widget-view+json': { model_id } }
  }));
  const none = { data: { 'text/plain': '1' } };
  const model = { length: 1 + outputs.length, get: (at: number) => outputs[at] ?? none };
  return { node, model: { id, executionState }, outputArea: { node: area, model, rendermime } };
}

describe('the waiting line', () => {
  it('is read from messages of comms that Kiwi named', () => {
    expect(readWait(update('kiwi-wait-1', 'c1', '<p>1st</p>'))).toEqual({
      id: 'kiwi-wait-1',
      cell: 'c1',
      widget: null,
      html: '<p>1st</p>'
    });
    expect(readWait(update('kiwi-wait-1', 'c1', ''))?.html).toBe('');
    expect(readWait(update('mine', 'c1', '<p>1st</p>'))).toBeNull();
    expect(readWait(update('kiwi-wait-1', null, '<p>1st</p>'))?.cell).toBeNull();
    const stream = { header: { msg_type: 'stream' }, content: {} };
    expect(readWait(stream as KernelMessage.IMessage)).toBeNull();
  });

  it('is below its cell, changes in place, and disappears', () => {
    const cells = [cell('c1'), cell('c2')];
    const lines = new WaitLines(() => cells);
    const text = () => cells.map(each => each.node.textContent);
    lines.show({ id: 'a', cell: 'c2', widget: null, html: '2nd in line' });
    expect(text()).toEqual(['', '2nd in line']);
    lines.show({ id: 'a', cell: 'c2', widget: null, html: '1st in line' });
    expect(text()).toEqual(['', '1st in line']);
    expect(cells[1]?.outputArea?.node.textContent).toBe('');
    lines.show({ id: 'a', cell: 'c2', widget: null, html: '' });
    expect(text()).toEqual(['', '']);
    expect(cells[1]?.node.childElementCount).toBe(1);
  });

  it('is below the cell that runs if the server, and not the page, has sent the cell', () => {
    const cells = [cell('c1'), cell('c2', 'running'), cell('c3')];
    const lines = new WaitLines(() => cells);
    lines.show({ id: 'a', cell: null, widget: null, html: '1st in line' });
    expect(cells.map(each => each.node.textContent)).toEqual(['', '1st in line', '']);
    lines.show({ id: 'a', cell: null, widget: null, html: '' });
    expect(cells.map(each => each.node.textContent)).toEqual(['', '', '']);
  });

  it('is below the widget whose callback waits, or below the last one that may have it', () => {
    const cells = [cell('c1', 'idle', ['w1']), cell('c2'), cell('c3', 'idle', ['box'])];
    const lines = new WaitLines(() => cells);
    const text = () => cells.map(each => each.node.textContent);
    lines.show({ id: 'a', cell: null, widget: 'w1', html: '1st' });
    lines.show({ id: 'b', cell: null, widget: 'inside the box', html: '2nd' });
    expect(text()).toEqual(['1st', '', '2nd']);
    lines.clear();
    expect(text()).toEqual(['', '', '']);
    expect(
      readWait({
        header: { msg_type: 'comm_msg' },
        content: { comm_id: 'kiwi-wait-2', data: { cell: null, widget: 'w1', html: '1st' } }
      } as unknown as KernelMessage.IMessage)?.widget
    ).toBe('w1');
  });

  it('leads to the sidebar, which says why', () => {
    const cells = [cell('c1')];
    const explain = vi.fn();
    const lines = new WaitLines(() => cells, explain);
    lines.show({ id: 'a', cell: 'c1', widget: null, html: '1st' });
    const button = cells[0]?.node.querySelector('button');
    expect(button?.textContent).toBe('Why?');
    button?.click();
    expect(explain).toHaveBeenCalledOnce();
    lines.clear();
    expect(cells[0]?.node.querySelector('button')).toBeNull();
  });

  it('disappears with its kernel, and needs no cell', () => {
    const cells = [cell('c1')];
    const lines = new WaitLines(() => cells);
    lines.show({ id: 'a', cell: 'gone', widget: null, html: '1st' });
    lines.show({ id: 'b', cell: 'c1', widget: null, html: '1st' });
    expect(cells[0]?.node.textContent).toBe('1st');
    lines.clear();
    expect(cells[0]?.node.textContent).toBe('');
  });
});
