// Queues of instructions, tokens between units, and what every unit does with an instruction.

module npu_queue #(
    parameter int DEPTH = 4,
    parameter int WIDTH = 128,
    parameter int BITS  = $clog2(DEPTH + 1)
) (
    input  logic             clk,
    input  logic             rst,
    input  logic             push,
    input  logic [WIDTH-1:0] d,
    output logic             full,
    input  logic             pop,
    output logic [WIDTH-1:0] head,
    output logic             valid,
    output logic [BITS-1:0]  count
);
  localparam logic [BITS-1:0] MOST = DEPTH[BITS-1:0];
  localparam logic [BITS-1:0] ONE = 1;
  logic [DEPTH*WIDTH-1:0] items;  // the head lowest
  assign full = count == MOST;
  assign valid = count != {BITS{1'b0}};
  assign head = items[WIDTH-1:0];
  genvar i;
  generate
    for (i = 0; i < DEPTH; i = i + 1) begin : g_item
      localparam logic [BITS-1:0] HERE = i;
      logic [WIDTH-1:0] behind;
      if (i + 1 < DEPTH) begin : g_behind
        assign behind = items[(i+1)*WIDTH+:WIDTH];
      end else begin : g_last
        assign behind = {WIDTH{1'b0}};
      end
      always_ff @(posedge clk) begin
        if (push && (pop ? count == HERE + ONE : count == HERE)) items[i*WIDTH+:WIDTH] <= d;
        else if (pop) items[i*WIDTH+:WIDTH] <= behind;
      end
    end
  endgenerate
  always_ff @(posedge clk) begin
    if (rst) count <= {BITS{1'b0}};
    else if (push && !pop) count <= count + ONE;
    else if (pop && !push) count <= count - ONE;
  end
`ifdef FORMAL
  logic started;
  initial started = 1'b0;
  always_ff @(posedge clk) started <= 1'b1;
  always @* assume (started || rst);
  always @* assume (!(push && full));
  always @* assume (!(pop && !valid));
  always_ff @(posedge clk) if (started) a_bound : assert (count <= MOST);
  // What is pushed leaves in its order: one marked item, found again after those before it.
  (* anyconst *) logic [WIDTH-1:0] marked;
  logic watching, seen;
  logic [BITS-1:0] ahead;
  (* anyseq *) logic choose;
  always_ff @(posedge clk) begin
    if (rst) begin
      watching <= 1'b0;
      seen <= 1'b0;
      ahead <= {BITS{1'b0}};
    end else begin
      if (!watching && !seen && choose && push && d == marked) begin
        watching <= 1'b1;
        ahead <= pop ? count - ONE : count;
      end else if (watching && pop) begin
        if (ahead == {BITS{1'b0}}) begin
          watching <= 1'b0;
          seen <= 1'b1;
        end else ahead <= ahead - ONE;
      end
    end
  end
  always_ff @(posedge clk) if (started && watching) begin
    a_inside : assert (ahead < count);
    a_place : assert (items[ahead*WIDTH+:WIDTH] == marked);
    if (ahead == {BITS{1'b0}}) a_order : assert (head == marked);
  end
`endif
endmodule

// Tokens from one unit to another: a counter that never leaves 0 to MOST.
module npu_token #(
    parameter int MOST = 15,
    parameter int BITS = $clog2(MOST + 1)
) (
    input  logic            clk,
    input  logic            rst,
    input  logic            put,
    output logic            room,
    input  logic            take,
    output logic            ready,
    output logic [BITS-1:0] count
);
  localparam logic [BITS-1:0] LIMIT = MOST[BITS-1:0];
  localparam logic [BITS-1:0] ONE = 1;
  assign room = count != LIMIT;
  assign ready = count != {BITS{1'b0}};
  always_ff @(posedge clk) begin
    if (rst) count <= {BITS{1'b0}};
    else if (put && !take) count <= count + ONE;
    else if (take && !put) count <= count - ONE;
  end
`ifdef FORMAL
  logic started;
  logic [31:0] puts, takes;
  initial started = 1'b0;
  always_ff @(posedge clk) started <= 1'b1;
  always @* assume (started || rst);
  always @* assume (!(put && !room));
  always @* assume (!(take && !ready));
  always_ff @(posedge clk) begin
    puts <= rst ? 32'd0 : puts + {31'd0, put};
    takes <= rst ? 32'd0 : takes + {31'd0, take};
  end
  always_ff @(posedge clk) if (started) begin
    a_bound : assert (count <= LIMIT);
    a_conserved : assert ({{(32 - BITS) {1'b0}}, count} == puts - takes);
  end
`endif
endmodule

// Takes the head of a queue when its tokens are there, runs it, posts its tokens.
module npu_issue #(
    parameter int NUMBER = 0
) (
    input  logic         clk,
    input  logic         rst,
    input  logic         valid,
    input  logic [127:0] head,
    output logic         pop,
    input  logic         prev_ready,
    input  logic         next_ready,
    output logic         prev_take,
    output logic         next_take,
    input  logic         prev_room,
    input  logic         next_room,
    output logic         prev_put,
    output logic         next_put,
    output logic         begins,
    output logic         runs,
    input  logic         done,
    output logic [1:0]   state,
    output logic [127:0] word
);
  localparam logic [1:0] IDLE = 2'd0, RUN = 2'd1, POST = 2'd2;
  logic waits_prev, waits_next, posts_prev, posts_next, post;
  assign waits_prev = head[6] && NUMBER != 0;
  assign waits_next = head[7] && NUMBER != 2;
  assign posts_prev = word[8] && NUMBER != 0;
  assign posts_next = word[9] && NUMBER != 2;
  assign pop = state == IDLE && valid && (!waits_prev || prev_ready) && (!waits_next || next_ready);
  assign prev_take = pop && waits_prev;
  assign next_take = pop && waits_next;
  assign post = state == POST && (!posts_prev || prev_room) && (!posts_next || next_room);
  assign prev_put = post && posts_prev;
  assign next_put = post && posts_next;
  assign begins = pop && head[3:0] != npu_words::OP_SYNC;
  assign runs = state == RUN;
  always_ff @(posedge clk) begin
    if (rst) begin
      state <= IDLE;
      word <= 128'd0;
    end else if (pop) begin
      state <= head[3:0] == npu_words::OP_SYNC ? POST : RUN;
      word <= head;
    end else if (runs && done) state <= POST;
    else if (post) state <= IDLE;
  end
endmodule
